//! `/metrics`, `/load` and `/healthz` over HTTP.

mod fakes;

use std::{fs, net::SocketAddr, thread};

use fakes::{gpus::uuid, kubelet::Kubelet, node::Node};
use serde_json::{Value, json};
use tessera_driver::{driver::Driver, http::serve, state::journal::JournalStore};
use tessera_runtime::{
    open_files,
    server::{health::probe, http::HttpServer},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// Serves the endpoints of the driver and returns their address.
fn serve_http(driver: &Driver) -> SocketAddr {
    let server = HttpServer::bind("127.0.0.1:0".parse().expect("an address")).expect("bound");
    let (bound, endpoints, stop) = (server.address(), driver.endpoints(), driver.stopping());
    thread::spawn(move || serve(server, &endpoints, &stop));
    bound
}

/// Requests `path` and returns the status code and the body.
async fn get(driver: &Driver, path: &str) -> (u16, String) {
    request(serve_http(driver), path).await
}

async fn request(address: SocketAddr, path: &str) -> (u16, String) {
    let mut connection = TcpStream::connect(address).await.expect("a connection");
    let request = format!("GET {path} HTTP/1.1\r\nHost: driver\r\n\r\n");
    connection.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (code, body.to_owned())
}

/// Requests `/healthz` until the check does not time out.
async fn health(driver: &Driver) -> (u16, String) {
    loop {
        let (code, body) = get(driver, "/healthz").await;
        if !body.starts_with("no answer within") {
            return (code, body);
        }
    }
}

#[tokio::test]
async fn serving_driver_is_healthy() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    assert_eq!(health(&driver).await.0, 200);
}

#[tokio::test]
async fn removed_socket_is_unhealthy() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    fs::remove_file(&driver.sockets().plugin).expect("removed");
    let (code, body) = health(&driver).await;
    assert_eq!(code, 503);
    assert!(body.contains("dra.sock"), "{body}");
}

#[tokio::test]
async fn unreadable_journal_is_unhealthy() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    fs::write(node.paths().journal(), "not a journal").expect("written");
    let (code, body) = health(&driver).await;
    assert_eq!(code, 503);
    assert!(body.contains("journal"), "{body}");
}

#[tokio::test]
async fn held_journal_lock_is_unhealthy_and_blocks_one_thread() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let other = JournalStore::new(node.paths());
    let held = other.lock().expect("locked");
    // With a check per thread, 512 of them would block all threads of the runtime.
    let bound = serve_http(&driver);
    let checks = (0..3).map(|_| request(bound, "/healthz"));
    for (code, body) in futures::future::join_all(checks).await {
        assert_eq!((code, body.as_str()), (503, "no answer within 3 s\n"));
    }
    drop(held);
    assert_eq!(health(&driver).await.0, 200);
}

#[tokio::test]
async fn probe_succeeds_while_clients_flood_the_metrics() {
    open_files::raise_limit();
    let node = Node::with_gpus(1);
    let mut driver = node.start().await;
    let socket = node.path("health.sock");
    driver.serve_health(&socket).expect("served");
    let address = driver.serve_http("127.0.0.1:0".parse().expect("an address")).expect("bound");
    let mut idle = Vec::new();
    for _ in 0..2000 {
        idle.push(TcpStream::connect(address).await.expect("a connection"));
    }
    let scrapes = (0..1000).map(|_| async move {
        let mut connection = TcpStream::connect(address).await.expect("a connection");
        // The server may have closed the connection.
        let _ = connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: driver\r\n\r\n").await;
        let _ = connection.read_to_end(&mut Vec::new()).await;
    });
    let scrapes = tokio::spawn(futures::future::join_all(scrapes));
    for _ in 0..5 {
        let socket = socket.clone();
        let probed = tokio::task::spawn_blocking(move || probe(&socket)).await;
        probed.expect("no panic").expect("healthy");
    }
    scrapes.await.expect("no panic");
    let open = fs::read_dir("/proc/self/fd").expect("/proc").count();
    assert!(open < idle.len() + 500, "{open} open files of both ends");
}

#[tokio::test]
async fn metrics_count_operations() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    kubelet.prepare(node.allocate("huge", &[(0, 99, 0)])).await.expect_err("refused");

    let (code, body) = get(&driver, "/metrics").await;
    assert_eq!(code, 200);
    for line in [
        "tessera_driver_prepared_claims 1",
        "tessera_driver_published_gpus 2",
        "tessera_driver_registered 1",
        "tessera_driver_nvml_up 1",
        r#"tessera_driver_claim_operations_total{operation="Prepare",outcome="Done"} 1"#,
        r#"tessera_driver_claim_operations_total{operation="Prepare",outcome="Failed"} 1"#,
        r#"tessera_driver_claim_operation_seconds_count{operation="Prepare"} 2"#,
        r#"tessera_driver_slice_writes_total{verb="Create"} 1"#,
    ] {
        assert!(body.contains(line), "{line} is not in:\n{body}");
    }
}

#[tokio::test]
async fn load_is_served() {
    let node = Node::with_gpus(2);
    node.gpus.work(1, &[(7, 40)]);
    let driver = node.start().await;
    let address = serve_http(&driver);
    // GPU 0 does not report its utilization.
    let expected = json!({"gpus": [
        {"uuid": uuid(1), "busyPercent": 40, "settledCoresPercent": 0},
    ]});
    loop {
        let (code, body) = request(address, "/load").await;
        assert_eq!(code, 200, "{body}");
        let load: Value = serde_json::from_str(&body).expect("JSON");
        if load == expected {
            break;
        }
        assert_eq!(load, json!({"gpus": []}), "not measured yet");
        tokio::task::yield_now().await;
    }
}
