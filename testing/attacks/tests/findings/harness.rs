//! A cluster with a tenant that attacks and a neighbour that is measured.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::Value;
use tessera_attacks::bounds;
use tessera_attacks::cluster::{AttackedCluster, Leadership, create};
use tessera_attacks::objects::{self, UNSTARTED_IMAGE, claim_entry};
use tessera_attacks::processes::Process;
use tessera_test_support::report_skip;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Mutex, MutexGuard};

/// Namespace of the attacker.
pub(crate) const TENANT: &str = "tenant";

/// Namespace that the attacker must not affect.
pub(crate) const NEIGHBOUR: &str = "neighbour";

/// Node with eight H100.
pub(crate) const NODE: &str = "node-a";

/// Time limit for operations that are not measured.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(600);

/// Tests of this program run one after the other, because they measure.
static TURN: Mutex<()> = Mutex::const_new(());

pub(crate) struct Harness {
    pub(crate) cluster: AttackedCluster,
    before: Leadership,
    _turn: MutexGuard<'static, ()>,
}

impl Harness {
    /// Starts a cluster. `None` if this machine cannot, which is reported as a skipped test.
    pub(crate) async fn start(test: &str) -> Option<Self> {
        let turn = TURN.lock().await;
        let cluster = match AttackedCluster::start().await.unwrap() {
            Ok(cluster) => cluster,
            Err(reason) => {
                report_skip(test, reason);
                return None;
            }
        };
        for namespace in [TENANT, NEIGHBOUR] {
            cluster.create_namespace(namespace).await.unwrap();
        }
        let harness = Self::led(cluster, turn).await;
        let peace = harness.measure_neighbour("peace").await;
        harness.report("allocated in peace after", peace);
        Some(harness)
    }

    /// Waits for a leader by a first allocation.
    async fn led(cluster: AttackedCluster, turn: MutexGuard<'static, ()>) -> Self {
        let before = cluster.leadership().await.unwrap();
        let mut harness = Self { cluster, before, _turn: turn };
        harness.measure_neighbour("first").await;
        harness.before = harness.cluster.leadership().await.unwrap();
        harness
    }

    /// Prints a measured figure.
    pub(crate) fn report(&self, what: &str, figure: impl std::fmt::Debug) {
        eprintln!("  {what} {figure:.2?}");
    }

    pub(crate) fn controller(&self) -> Process {
        self.cluster.controller().unwrap()
    }

    pub(crate) fn driver(&self) -> Process {
        self.cluster.driver(NODE).unwrap()
    }

    /// Creates a claim, and a pod of the same name that uses it.
    pub(crate) async fn pod(&self, namespace: &str, name: &str, devices: &Value) -> ResourceClaim {
        self.pod_of("default-scheduler", namespace, name, devices).await
    }

    /// Creates a claim, and a pod of the same name that uses it, for this scheduler.
    pub(crate) async fn pod_of(
        &self,
        scheduler: &str,
        namespace: &str,
        name: &str,
        devices: &Value,
    ) -> ResourceClaim {
        let claim = objects::claim(name, devices);
        let claim = create(&self.cluster.api(namespace), claim).await.unwrap();
        let mut pod = objects::pod(name, UNSTARTED_IMAGE, &[claim_entry("gpu", name)]);
        pod["spec"]["schedulerName"] = scheduler.into();
        create::<Pod>(&self.cluster.api(namespace), pod).await.unwrap();
        claim
    }

    pub(crate) async fn wait_allocated(&self, namespace: &str, name: &str) {
        self.cluster.wait_allocated(namespace, name, TIMEOUT).await.unwrap();
    }

    /// Returns the time from the creation of a neighbour's pod to its allocation.
    pub(crate) async fn measure_neighbour(&self, name: &str) -> Duration {
        self.measure(NEIGHBOUR, name).await
    }

    /// Returns the time from the creation of a pod to its allocation.
    pub(crate) async fn measure(&self, namespace: &str, name: &str) -> Duration {
        let begun = Instant::now();
        self.pod(namespace, name, &objects::share("1Gi")).await;
        self.wait_allocated(namespace, name).await;
        begun.elapsed()
    }

    /// Returns the median time from creation to allocation of this number of pods, created one
    /// after the other.
    pub(crate) async fn median(&self, namespace: &str, prefix: &str, pods: usize) -> Duration {
        let mut latencies = Vec::new();
        for number in 0..pods {
            latencies.push(self.measure(namespace, &format!("{prefix}-{number}")).await);
        }
        latencies.sort_unstable();
        latencies[pods / 2]
    }

    /// Checks that several pods of the neighbour, one after the other, are allocated within the
    /// limit.
    pub(crate) async fn check_neighbour(&self, strict: Duration) {
        let mut longest = Duration::ZERO;
        for number in 0..bounds::size(5, 2) {
            let cpu_before = self.controller().usage().unwrap().cpu_s;
            let latency = self.measure_neighbour(&format!("attacked-{number}")).await;
            let cpu = self.controller().usage().unwrap().cpu_s - cpu_before;
            self.report("allocated under attack after, CPU seconds:", (latency, cpu));
            longest = longest.max(latency);
        }
        assert!(longest <= bounds::limit(strict), "allocated after {longest:?}");
    }

    /// Checks that of many pods of the neighbour, one after the other, at most one in a hundred is
    /// allocated after the limit.
    pub(crate) async fn check_neighbour_often(&self, strict: Duration) {
        let mut latencies = Vec::new();
        let (begun, cpu_before) = (Instant::now(), self.controller().usage().unwrap().cpu_s);
        for number in 0..bounds::size(200, 5) {
            latencies.push(self.measure_neighbour(&format!("attacked-{number}")).await);
        }
        latencies.sort_unstable();
        let cpu = self.controller().usage().unwrap().cpu_s - cpu_before;
        self.report("cores of the controller meanwhile:", cpu / begun.elapsed().as_secs_f64());
        let (half, most) = (latencies[latencies.len() / 2], latencies[latencies.len() * 99 / 100]);
        self.report("allocated under attack after, p50 and p99:", (half, most));
        assert!(most <= bounds::limit(strict), "p99 of {} pods: {most:?}", latencies.len());
    }

    /// Waits until the controller takes less than a tenth of a core for two seconds.
    pub(crate) async fn wait_idle(&self, limit: Duration) {
        const PERIOD: Duration = Duration::from_secs(2);
        let begun = Instant::now();
        loop {
            let before = self.controller().usage().unwrap().cpu_s;
            tokio::time::sleep(PERIOD).await;
            let cores = (self.controller().usage().unwrap().cpu_s - before) / PERIOD.as_secs_f64();
            if cores < 0.1 {
                self.report("idle after, cores:", (begun.elapsed() - PERIOD, cores));
                return;
            }
            assert!(begun.elapsed() < limit + PERIOD, "{cores} cores after {:?}", begun.elapsed());
        }
    }

    /// Checks that the leader has neither lost its Lease nor been restarted.
    pub(crate) async fn check_leader(&self) {
        assert_eq!(self.cluster.leadership().await.unwrap(), self.before);
    }

    /// Checks the highest resident memory of a process so far.
    pub(crate) fn check_memory(&self, process: &Process, mib: f64) {
        let usage = process.usage().unwrap();
        self.report(&format!("{}: highest memory in MiB", process.label()), usage.peak_rss_mib);
        assert!(usage.peak_rss_mib < mib, "{}: {usage:?}, limit {mib} MiB", process.label());
    }
}

/// Sends a request to `/metrics` of a process, and returns the answer; empty if the connection was
/// closed.
pub(crate) async fn scrape(process: &Process) -> String {
    let mut stream =
        TcpStream::connect(process.argument("--metrics-address").unwrap()).await.unwrap();
    // The server may have closed the connection.
    let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: tessera\r\n\r\n").await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}
