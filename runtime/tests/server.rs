//! Servers under load of clients that send nothing, or ask much.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use futures::{StreamExt, stream::FuturesUnordered};
use tessera_runtime::{
    open_files,
    server::{
        health::{HealthSocket, ProbeError, probe},
        http::{self, HttpServer, ServerLimits},
        single_flight::SingleFlight,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use tokio_util::sync::{CancellationToken, DropGuard};

const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: driver\r\n\r\n";

/// A time that does not pass in a test.
const NEVER: Duration = Duration::from_secs(24 * 3600);

/// Serves what `render` returns. Stops when the guard is dropped.
fn serve(
    limits: ServerLimits,
    render: impl Fn() -> String + Send + Sync + 'static,
) -> (SocketAddr, DropGuard) {
    let server = HttpServer::bind("127.0.0.1:0".parse().expect("an address")).expect("bound");
    let (address, stop) = (server.address(), CancellationToken::new());
    let stopped = stop.clone();
    let server = server.with_limits(limits);
    thread::spawn(move || server.run(http::metrics(render), &stopped).expect("served"));
    (address, stop.drop_guard())
}

/// Connects from an address of the loopback network.
async fn connect(server: SocketAddr, from: u8) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    let own = IpAddr::V4(Ipv4Addr::new(127, 0, 0, from));
    socket.bind(SocketAddr::new(own, 0)).expect("bound");
    socket.connect(server).await.expect("connected")
}

/// Returns all that the server sends until it closes the connection.
async fn read(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    // A connection that the server does not take may be reset.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).expect("text")
}

/// Returns the answer to a request for the metrics, empty if the server closes the connection.
async fn scrape(server: SocketAddr, from: u8) -> String {
    let mut stream = connect(server, from).await;
    let _ = stream.write_all(REQUEST).await;
    read(stream).await
}

/// Scrapes until the server has a place.
async fn served_at_some_time(server: SocketAddr, from: u8) {
    let served = async { while scrape(server, from).await.is_empty() {} };
    timeout(Duration::from_secs(120), served).await.expect("served");
}

#[tokio::test]
async fn idle_clients_get_few_connections_and_others_are_served() {
    open_files::raise_limit();
    let limits = ServerLimits { head_timeout: NEVER, total_timeout: NEVER, ..Default::default() };
    let (server, _guard) = serve(limits, || "tessera_up 1\n".to_owned());
    let mut idle = FuturesUnordered::new();
    for _ in 0..2000 {
        let mut stream = connect(server, 1).await;
        idle.push(async move {
            let closed = !matches!(stream.read(&mut [0]).await, Ok(1));
            (stream, closed)
        });
    }
    let open = limits.connections_per_address;
    for _ in 0..2000 - open {
        assert!(idle.next().await.expect("more").1, "the server has sent nothing");
    }
    // The others are open: the server waits for their requests.
    assert_eq!(idle.len(), open);
    let answer = scrape(server, 2).await;
    assert!(answer.ends_with("tessera_up 1\n"), "{answer}");
}

#[tokio::test]
async fn connections_of_all_addresses_are_bounded() {
    let limits = ServerLimits { head_timeout: NEVER, total_timeout: NEVER, ..Default::default() };
    let (server, _guard) = serve(limits, || "tessera_up 1\n".to_owned());
    let mut idle = Vec::new();
    for from in 1..=4 {
        for _ in 0..limits.connections_per_address {
            idle.push(connect(server, from).await);
        }
    }
    assert_eq!(idle.len(), limits.connections);
    assert_eq!(scrape(server, 5).await, "");
    drop(idle.pop());
    // The server sees the end of a connection at some time.
    served_at_some_time(server, 5).await;
}

#[tokio::test]
async fn silent_connection_is_closed_after_the_time_limit() {
    let limits = ServerLimits {
        head_timeout: Duration::from_millis(1),
        total_timeout: NEVER,
        ..Default::default()
    };
    let (server, _guard) = serve(limits, String::new);
    assert_eq!(read(connect(server, 1).await).await, "");
    let mut half = connect(server, 1).await;
    half.write_all(b"GET /metrics HTTP/1.1\r\n").await.expect("sent");
    assert!(!read(half).await.contains("200 OK"));
}

#[tokio::test]
async fn client_that_does_not_read_is_closed_after_the_time_limit() {
    let limits = ServerLimits {
        total_timeout: Duration::from_millis(100),
        connections: 1,
        ..Default::default()
    };
    // More than the buffers of the kernel take.
    let (server, _guard) = serve(limits, || "x".repeat(64 << 20));
    let mut silent = connect(server, 1).await;
    silent.write_all(REQUEST).await.expect("sent");
    // The place becomes free although the first client keeps its connection.
    served_at_some_time(server, 2).await;
    drop(silent);
}

#[tokio::test]
async fn concurrent_scrapes_render_once_at_a_time_beside_the_probe() {
    open_files::raise_limit();
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let seen = Arc::clone(&most);
    let (server, _guard) = serve(ServerLimits::default(), move || {
        seen.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let text = "tessera_up 1\n".repeat(100_000);
        running.fetch_sub(1, Ordering::SeqCst);
        text
    });
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("health.sock");
    let (socket, stop) = (HealthSocket::bind(&path).expect("bound"), CancellationToken::new());
    let _stop = stop.clone().drop_guard();
    let check = SingleFlight::new(|| async { Ok(()) });
    thread::spawn(move || socket.run(&check, &stop).expect("served"));

    let mut scrapes: FuturesUnordered<_> =
        (0..1000).map(|number| scrape(server, 1 + (number % 250) as u8)).collect();
    let probing = tokio::task::spawn_blocking(move || {
        for _ in 0..20 {
            probe(&path).expect("healthy");
        }
    });
    let mut served = 0;
    while let Some(answer) = scrapes.next().await {
        served += usize::from(answer.ends_with("tessera_up 1\n"));
    }
    probing.await.expect("every probe succeeds");
    assert!(served > 0, "no scrape was served");
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn probe_reports_why_the_program_is_unhealthy() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("health.sock");
    let missing = probe(&path).expect_err("no program");
    assert!(matches!(missing, ProbeError::NoAnswer(_)), "{missing}");

    let (socket, stop) = (HealthSocket::bind(&path).expect("bound"), CancellationToken::new());
    let _stop = stop.clone().drop_guard();
    let check = SingleFlight::new(|| async { Err("the journal is locked".to_owned()) });
    thread::spawn(move || socket.run(&check, &stop).expect("served"));
    let error = tokio::task::spawn_blocking(move || probe(&path)).await.expect("no panic");
    let error = error.expect_err("not healthy").to_string();
    assert_eq!(error, "not healthy: the journal is locked");
}

#[test]
fn socket_of_an_earlier_process_is_replaced() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("health.sock");
    drop(HealthSocket::bind(&path).expect("bound"));
    HealthSocket::bind(&path).expect("bound again");
}
