//! H1: clients of the metrics port that send nothing, or ask much.

use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use futures::future::join_all;
use tessera_attacks::bounds;
use tessera_attacks::processes::Process;
use tessera_runtime::open_files;
use tessera_test_support::test_name;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::harness::{Harness, scrape};

/// Longest time of a probe. The chart's probes fail after several seconds.
const PROBE: Duration = Duration::from_secs(1);

/// Most memory that connections add.
const MEMORY_MIB: f64 = 32.0;

/// Runs the command of the kubelet's probe.
async fn probe(process: &Process) -> ExitStatus {
    let program = std::fs::read_link(format!("/proc/{}/exe", process.pid)).unwrap();
    let mut probe = Command::new(program);
    if let Some(node) = process.argument("--node-name") {
        probe.args(["--node-name", node]);
    }
    probe.args(["healthz", "--health-socket", process.argument("--health-socket").unwrap()]);
    probe.stdin(Stdio::null()).kill_on_drop(true).status().await.unwrap()
}

/// Opens connections that send the begin of a request.
async fn idle_connections(process: &Process, count: usize) -> Vec<TcpStream> {
    let address = process.argument("--metrics-address").unwrap();
    let mut idle = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(address).await.unwrap();
        // The server may have closed the connection.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n").await;
        idle.push(stream);
    }
    idle
}

async fn flood(harness: &Harness, process: Process) {
    let before = process.usage().unwrap();
    let _idle = idle_connections(&process, 2000).await;
    let open = process.open_files().unwrap();
    harness.report(&format!("{}: open files", process.label()), open);
    assert!(open < 200, "{}: {open} open files", process.label());
    let scraped = process.clone();
    let scrapes = tokio::spawn(async move { join_all((0..1000).map(|_| scrape(&scraped))).await });
    for _ in 0..5 {
        let begun = Instant::now();
        assert!(probe(&process).await.success());
        harness.report("healthy after", begun.elapsed());
        assert!(begun.elapsed() <= bounds::limit(PROBE), "{:?}", begun.elapsed());
    }
    scrapes.await.unwrap();
    let added = process.usage().unwrap().peak_rss_mib - before.rss_mib;
    harness.report("added memory in MiB", added);
    assert!(added < MEMORY_MIB, "{}: {added} MiB more", process.label());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn floods_of_metrics_ports_fail_no_probe() {
    open_files::raise_limit();
    let Some(harness) = Harness::start(test_name!()).await else { return };
    for process in [harness.driver(), harness.controller()] {
        flood(&harness, process).await;
    }
    harness.check_neighbour(PROBE).await;
    harness.check_leader().await;
    harness.cluster.stop().await.unwrap();
}
