//! Trials: what scenarios cannot say, since it needs hands on the machines or an eye on every
//! moment.

mod admission;
mod bench;
mod chaos;
mod clock;
mod control_plane;
mod controller;
mod controller_crash;
mod controller_deployment;
mod counters;
mod crowd;
mod deleted_early;
mod driver_crash;
mod driver_instances;
mod driver_update;
mod fence;
mod frozen_leader;
mod gpu;
mod guests;
mod host_pid;
mod intercept_modes;
mod lost_claims;
mod misplaced;
mod mps;
mod neighbour;
mod node;
mod other_allocator;
mod overcommit;
mod oversubscription;
mod placement;
mod plugin;
mod pod_watch;
mod policies;
mod prebind_race;
mod preemption;
mod progress;
mod refused_node;
mod release;
mod residue;
mod restart;
mod room;
mod slices;
mod soak;
mod stock;
mod stripped;
mod tampering;

pub mod ledger;

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, Config};
use tokio::time::{sleep, timeout};

pub use bench::Bench;
pub use soak::SoakSize;

use crate::harness::Trial;
use crate::inventory::GpuNodes;
use crate::operations::Operations;
use crate::plugin::Plugin;

/// A cluster to run on.
#[derive(Clone)]
pub struct Cluster {
    config: Config,
    client: Client,
    operations: Option<Operations>,
    plugin: Option<Plugin>,
    sizes: Sizes,
    gpu_nodes: GpuNodes,
}

/// How much the long trials do.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Claims that two allocators fight over.
    pub fenced_claims: usize,
    /// Pods that come and go while components are killed.
    pub soak: SoakSize,
}

impl Sizes {
    /// The stand-ins, as part of all tests: a minute each.
    pub const SIMULATED: Self = Self {
        fenced_claims: 1000,
        soak: SoakSize { pods: 300, started_percent: 3, pause: Duration::from_secs(4) },
    };
    /// A real API server, real containers: a minute or two each.
    pub const REAL: Self = Self {
        fenced_claims: 500,
        soak: SoakSize { pods: 100, started_percent: 100, pause: Duration::from_secs(10) },
    };

    /// The same, but for what $TESSERA_FENCE_CLAIMS and $TESSERA_SOAK_PODS say.
    ///
    /// # Errors
    /// It is set to something other than a number.
    pub fn or_from_environment(self) -> anyhow::Result<Self> {
        let soak = SoakSize { pods: number("TESSERA_SOAK_PODS", self.soak.pods)?, ..self.soak };
        Ok(Self { fenced_claims: number("TESSERA_FENCE_CLAIMS", self.fenced_claims)?, soak })
    }
}

fn number(variable: &str, otherwise: usize) -> anyhow::Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("${variable} is no number: {text}")),
        Err(_) => Ok(otherwise),
    }
}

impl Cluster {
    /// The cluster of that configuration, and what acts on its machines.
    ///
    /// # Errors
    /// The configuration makes no client.
    pub fn new(config: Config, operations: Option<Operations>) -> Result<Self, kube::Error> {
        // With several linked in, rustls does not choose. An error means that the process has
        // chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_from(config.clone())?;
        let gpu_nodes = GpuNodes::default();
        Ok(Self { config, client, operations, plugin: None, sizes: Sizes::REAL, gpu_nodes })
    }

    /// The same cluster, for long trials of other sizes than those for a real one.
    #[must_use]
    pub fn with_sizes(self, sizes: Sizes) -> Self {
        Self { sizes, ..self }
    }

    /// The same cluster, looked at through `kubectl tessera` too.
    #[must_use]
    pub fn with_plugin(self, plugin: Option<Plugin>) -> Self {
        Self { plugin, ..self }
    }

    /// The administrator.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The nodes that publish GPUs.
    pub fn gpu_nodes(&self) -> &GpuNodes {
        &self.gpu_nodes
    }

    /// Ends when so many reads in a row have failed that no trial keeps its API server down for as
    /// long: two minutes at least. Counted, since a trial that holds this thread up holds a
    /// clock up as well.
    pub async fn lost(&self) {
        const READS: u32 = 24;
        const PAUSE: Duration = Duration::from_secs(5);
        let nodes = Api::<Node>::all(self.client.clone());
        let one = ListParams::default().limit(1);
        let mut failed = 0;
        while failed < READS {
            sleep(PAUSE).await;
            let read = timeout(PAUSE, nodes.list(&one)).await;
            failed = if let Ok(Ok(_)) = read { 0 } else { failed + 1 };
        }
    }
}

/// One trial in a namespace of its own.
macro_rules! trial {
    ($name:literal, $run:expr) => {
        Trial::new(concat!("trial/", $name), async move |cluster| {
            Bench::new(&cluster, $name).run($run).await
        })
    };
}

/// The trials that any cluster can do, the stand-ins too.
pub fn all() -> Vec<Trial> {
    vec![
        trial!("driver-restart", restart::driver),
        trial!("kubelet-restart", restart::kubelet),
        trial!("containerd-restart", restart::containerd),
        trial!("controller-stopped", controller::stopped),
        trial!("lost-gpu", gpu::lost),
        trial!("gpu-recovers", gpu::recovers),
        trial!("slices-tampered", slices::put_right),
        trial!("other-allocator-dra", other_allocator::dra_driver),
        trial!("other-allocator-plugin", other_allocator::device_plugin),
        trial!("neighbours-pool", neighbour::refused),
        trial!("room", room::measured),
        trial!("hundred-pods", crowd::hundred),
        trial!("two-allocators-unfenced", fence::unfenced),
        trial!("two-allocators-fenced", fence::fenced),
        trial!("deleted-before-binding", deleted_early::freed),
        trial!("policies", admission::held),
        trial!("forged-grant", tampering::forged),
        trial!("ruined-ledgers", tampering::ledgers),
        trial!("stripped-finalizer", stripped::counted),
        trial!("misplaced", misplaced::repaired),
        trial!("counters", counters::bound),
        trial!("plugin", plugin::told_truly),
        trial!("soak", soak::survived),
    ]
}

/// The trials that need a real Kubernetes: what they are about is left out of the stand-ins.
pub fn on_real_cluster() -> Vec<Trial> {
    vec![
        trial!("refused-by-port", refused_node::by_port),
        trial!("refused-by-affinity", refused_node::by_affinity),
        trial!("refused-everywhere", refused_node::everywhere),
        trial!("preemption", preemption::stays),
        trial!("prebind-race", prebind_race::forced),
        trial!("controller-killed", controller_crash::killed),
        trial!("frozen-leader", frozen_leader::replaced),
        trial!("driver-killed", driver_crash::killed),
        trial!("driver-prepare-cancelled", driver_crash::cancelled),
        trial!("rights", admission::held_with_rights),
        trial!("forged-grant-by-image", tampering::forged_by_image),
        trial!("guests", guests::unharmed),
        trial!("host-pid", host_pid::told),
        trial!("intercept-modes", intercept_modes::there_and_back),
        trial!("exhausted-dev", tampering::exhausted),
        trial!("namespaces-of-a-tenant", tampering::namespaces),
        trial!("helm-upgrade", release::upgraded),
        trial!("helm-uninstall", release::removed),
        trial!("stock-mode", stock::there_and_back),
        trial!("oversubscription", oversubscription::there_and_back),
        trial!("mps", mps::there_and_back),
        trial!("control-plane-restarts", control_plane::restarted),
        trial!("node-deleted", node::deleted),
        trial!("driver-two-instances", driver_update::two_instances),
        trial!("driver-cdi-file-deleted", driver_update::cdi_file_deleted),
    ]
}

/// Faults of the API server, by a plan from each seed, and clocks that are wrong. Only the
/// stand-ins can do that, when they are served with `--clocks`.
pub fn on_faulty_cluster(seeds: Vec<u64>) -> Vec<Trial> {
    vec![
        trial!("wrong-clock", clock::of_a_node),
        trial!("chaos", |bench| chaos::survived(bench, seeds)),
    ]
}

/// What has to come after everything else.
pub fn last() -> Vec<Trial> {
    vec![trial!("no-residue", residue::none)]
}
