//! Reads one sample from a program's `/metrics`.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Returns the first sample of the metric whose labels contain `label`, as in the response.
pub(crate) async fn sample(
    address: SocketAddr,
    metric: &str,
    label: &str,
) -> anyhow::Result<String> {
    let text = get(address).await.with_context(|| format!("cannot read metrics of {address}"))?;
    let is_wanted = |line: &&str| line.starts_with(metric) && line.contains(label);
    let line = text.lines().find(is_wanted);
    Ok(line.with_context(|| format!("no {metric} with {label} at {address}"))?.to_owned())
}

async fn get(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    // In HTTP/1.0 the body is neither chunked nor followed by another response.
    let request = format!("GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}
