//! Remote control of a test bed, with the commands of `e2e/cluster/node.sh`.
//!
//! `tessera-simcluster serve` listens on a unix socket; `tessera-simcluster node ACTION NODE ...`
//! sends it a command.

use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::TestBed;

/// Interval at which exited programs are restarted, as Kubernetes would. On a busy machine a leader
/// can lose its lease, and exit, without any injected fault.
const RESTART_INTERVAL: std::time::Duration = std::time::Duration::from_millis(500);

#[derive(Debug, Serialize, Deserialize)]
struct Response {
    ok: bool,
    text: String,
}

/// Handles one connection after the other. Runs until dropped.
pub(crate) async fn serve(listener: UnixListener, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(RESTART_INTERVAL);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            _ = ticks.tick() => {
                test_bed.restart_exited()?;
                continue;
            }
        };
        if let Err(error) = handle_connection(stream, test_bed).await {
            tracing::warn!(error = format!("{error:#}"), "cannot answer control request");
        }
    }
}

async fn handle_connection(stream: UnixStream, test_bed: &mut TestBed) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let words: Vec<String> = serde_json::from_str(&line)?;
    let response = match execute(&words, test_bed).await {
        Ok(text) => Response { ok: true, text },
        Err(error) => Response { ok: false, text: format!("{error:#}") },
    };
    let mut text = serde_json::to_vec(&response)?;
    text.push(b'\n');
    Ok(stream.get_mut().write_all(&text).await?)
}

/// Sends a command to the test bed behind `socket` and prints the response.
pub(crate) async fn send(socket: &Path, words: &[String]) -> anyhow::Result<()> {
    let stream = UnixStream::connect(socket).await;
    let mut stream = stream.with_context(|| {
        format!("no server at `{}`; run `tessera-simcluster serve`", socket.display())
    })?;
    let mut text = serde_json::to_vec(words)?;
    text.push(b'\n');
    stream.write_all(&text).await?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    let response: Response =
        serde_json::from_str(&line).context("the test bed exited before it answered")?;
    if !response.ok {
        bail!(response.text);
    }
    print!("{}", response.text);
    Ok(())
}

async fn execute(words: &[String], test_bed: &mut TestBed) -> anyhow::Result<String> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["restart", node, component] => {
            stop(test_bed, node, component, false).await?;
            start(test_bed, node, component).await?;
        }
        ["stop", node, component] => stop(test_bed, node, component, false).await?,
        ["kill", node, component] => stop(test_bed, node, component, true).await?,
        ["start", node, component] => start(test_bed, node, component).await?,
        ["policies", "control-plane", state @ ("on" | "off")] => {
            test_bed.set_policies(state == "on")
        }
        ["residue", node] => return test_bed.node(node)?.residue(),
        ["gpu", node, ..] => {
            let arguments: Vec<String> = words[2..].iter().map(|word| (*word).to_owned()).collect();
            return test_bed.node(node)?.gpu(&arguments).await;
        }
        ["chaos", "begin", seed, seconds] => {
            test_bed.begin_chaos(seed.parse()?, seconds.parse()?)?
        }
        ["chaos", "report"] => return test_bed.chaos_report(),
        ["chaos", "end"] => test_bed.end_chaos()?,
        ["clock", "control-plane", seconds] => {
            test_bed.set_clock("controller.clock", seconds.parse()?)?
        }
        ["clock", node, seconds] => {
            test_bed.set_clock(&format!("{node}/driver.clock"), seconds.parse()?)?
        }
        _ => bail!("unknown command: {}", words.join(" ")),
    }
    Ok(String::new())
}

async fn stop(
    test_bed: &mut TestBed,
    node: &str,
    component: &str,
    hard: bool,
) -> anyhow::Result<()> {
    match (node, component) {
        ("control-plane", "controller") if hard => test_bed.controller.kill().await,
        ("control-plane", "controller") => test_bed.controller.stop().await,
        (_, "driver") if hard => test_bed.node(node)?.driver.kill().await,
        (_, "driver") => test_bed.node(node)?.driver.stop().await,
        (_, "kubelet") => {
            test_bed.node(node)?.stop_kubelet().await;
            Ok(())
        }
        _ => bail!("{node} has no {component} that can be stopped"),
    }
}

async fn start(test_bed: &mut TestBed, node: &str, component: &str) -> anyhow::Result<()> {
    match (node, component) {
        ("control-plane", "controller") => test_bed.controller.start_again(),
        (_, "driver") => test_bed.node(node)?.driver.start_again(),
        (_, "kubelet") => test_bed.node(node)?.start_kubelet().await,
        _ => bail!("{node} has no {component} that can be started"),
    }
}
