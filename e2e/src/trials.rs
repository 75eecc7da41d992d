//! Trials: end-to-end tests in Rust, which need access to machines or continuous monitoring.

mod admission;
mod chaos;
mod claim_watch;
mod clock;
mod control_plane;
mod controller;
mod controller_crash;
mod controller_deployment;
mod converted_pods;
mod counters;
mod defaults;
mod defragmentation;
mod deleted_early;
mod dialect_pods;
mod dialects;
mod driver_crash;
mod driver_instances;
mod driver_update;
mod fence;
mod freed_capacity;
mod frozen_leader;
mod gpu;
mod gpu_drain;
mod gpu_preemption;
mod gpu_recovery;
mod graceful_shutdown;
mod groups;
mod host_pid;
mod hundred_pods;
mod intercept_modes;
mod load;
mod lost_claims;
mod managed_drivers;
mod mig;
mod migration;
mod misplaced;
mod mps;
mod no_execute;
mod node;
mod node_drain;
mod nomination;
mod other_allocator;
mod other_pool;
mod out_of_service;
mod overcommit;
mod oversubscription;
mod placeholder_pods;
mod placement;
mod plugin;
mod pod_group_objects;
mod pod_watch;
mod policies;
mod prebind_race;
mod preemption;
mod progress;
mod quotas;
mod reboot;
mod refused_node;
mod release;
mod removed_claim;
mod residue;
mod resize;
mod restart;
mod slices;
mod soak;
mod stock;
mod tampering;
mod test_bed;
mod third_party_programs;
mod two_allocators;
mod unclaimed_gpus;
mod unfinished_pods;

pub mod device_usage;

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, Config};
use tokio::time::{sleep, timeout};

pub(crate) use dialect_pods::dialect_manifest;
pub use soak::SoakSize;
pub use test_bed::TestBed;

use crate::harness::Trial;
use crate::inventory::GpuNodes;
use crate::operations::Operations;
use crate::plugin::Plugin;

/// A cluster under test.
#[derive(Clone)]
pub struct Cluster {
    config: Config,
    client: Client,
    operations: Option<Operations>,
    plugin: Option<Plugin>,
    sizes: Sizes,
    gpu_nodes: GpuNodes,
}

/// Sizes of the long trials.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Claims in the trials with two allocators.
    pub two_allocator_claims: usize,
    /// Rounds of the trial with two groups.
    pub group_rounds: usize,
    /// Size of the soak trial.
    pub soak: SoakSize,
}

impl Sizes {
    /// Sizes for the simulated cluster as part of all tests: one minute per trial.
    pub const SIMULATED: Self = Self {
        two_allocator_claims: 1000,
        group_rounds: 3,
        soak: SoakSize { pods: 300, started_percent: 3, pause: Duration::from_secs(4) },
    };
    /// Sizes for a real cluster with real containers: one or two minutes per trial.
    pub const REAL: Self = Self {
        two_allocator_claims: 500,
        group_rounds: 2,
        soak: SoakSize { pods: 100, started_percent: 100, pause: Duration::from_secs(10) },
    };

    /// Returns these sizes with those of `$TESSERA_FENCE_CLAIMS`, `$TESSERA_GROUP_ROUNDS` and
    /// `$TESSERA_SOAK_PODS`, where set.
    ///
    /// # Errors
    /// Returns an error if a variable is not a number.
    pub fn with_environment(self) -> anyhow::Result<Self> {
        let soak = SoakSize { pods: number("TESSERA_SOAK_PODS", self.soak.pods)?, ..self.soak };
        Ok(Self {
            two_allocator_claims: number("TESSERA_FENCE_CLAIMS", self.two_allocator_claims)?,
            group_rounds: number("TESSERA_GROUP_ROUNDS", self.group_rounds)?,
            soak,
        })
    }
}

fn number(variable: &str, otherwise: usize) -> anyhow::Result<usize> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("${variable} is not a number: {text}")),
        Err(_) => Ok(otherwise),
    }
}

impl Cluster {
    /// Creates the cluster of that configuration, with operations on its machines where available.
    ///
    /// # Errors
    /// Returns an error if the configuration is invalid.
    pub fn new(config: Config, operations: Option<Operations>) -> Result<Self, kube::Error> {
        // rustls requires an explicit choice if several providers are linked in. An error means
        // that the process has already chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_from(config.clone())?;
        let gpu_nodes = GpuNodes::default();
        Ok(Self { config, client, operations, plugin: None, sizes: Sizes::REAL, gpu_nodes })
    }

    /// Sets the sizes of the long trials.
    #[must_use]
    pub fn with_sizes(self, sizes: Sizes) -> Self {
        Self { sizes, ..self }
    }

    /// Sets the `kubectl tessera` plugin.
    #[must_use]
    pub fn with_plugin(self, plugin: Option<Plugin>) -> Self {
        Self { plugin, ..self }
    }

    /// Returns the administrator's client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the nodes that publish GPUs.
    pub fn gpu_nodes(&self) -> &GpuNodes {
        &self.gpu_nodes
    }

    /// Completes when the API server has failed 24 reads in a row, which takes at least two
    /// minutes. No trial stops its API server for that long. Reads are counted, because a trial
    /// that blocks this thread also delays the timer.
    pub async fn wait_lost(&self) {
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

/// Creates a trial that runs in its own namespace.
macro_rules! trial {
    ($name:literal, $run:expr) => {
        Trial::new(concat!("trial/", $name), async move |cluster| {
            TestBed::new(&cluster, $name).run($run).await
        })
    };
}

/// Returns the trials that run on any cluster, including the simulated one.
pub fn portable() -> Vec<Trial> {
    vec![
        trial!("driver-restart", restart::driver),
        trial!("kubelet-restart", restart::kubelet),
        trial!("containerd-restart", restart::containerd),
        trial!("controller-stopped", controller::stopped),
        trial!("lost-gpu", gpu::lost),
        trial!("gpu-recovers", gpu::recovers),
        trial!("slices-tampered", slices::check_repaired),
        trial!("other-allocator-dra", other_allocator::dra_driver),
        trial!("other-allocator-plugin", other_allocator::device_plugin),
        trial!("pool-of-other-node", other_pool::refused),
        trial!("nomination", nomination::precedes_binding),
        trial!("freed-capacity", freed_capacity::measure),
        trial!("hundred-pods", hundred_pods::run_pods),
        trial!("two-allocators-without-policies", two_allocators::without_policies),
        trial!("two-allocators-with-policies", two_allocators::with_policies),
        trial!("deleted-before-binding", deleted_early::released),
        trial!("admission-policies", admission::enforce_policies),
        trial!("forged-grant", tampering::forge_grant),
        trial!("corrupted-ledgers", tampering::corrupt_ledgers),
        trial!("removed-finalizer", removed_claim::check_still_counted),
        trial!("misplaced-pod", misplaced::check_reallocated),
        trial!("shared-counters", counters::limit_partitions),
        trial!("kubectl-plugin", plugin::compare_with_controller),
        trial!("converted-pods", converted_pods::run),
        trial!("defaults", defaults::complete),
        trial!("quota", quotas::race),
        trial!("groups", groups::run_in_turn),
        trial!("resize", resize::grows_and_shrinks),
        trial!("soak", soak::run),
    ]
}

/// Returns the trials that need a real Kubernetes: the simulated cluster lacks what they test.
pub fn on_real_cluster() -> Vec<Trial> {
    vec![
        trial!("refused-by-port", refused_node::by_port),
        trial!("refused-by-affinity", refused_node::by_affinity),
        trial!("refused-everywhere", refused_node::everywhere),
        trial!("preemption", preemption::keeps_allocation),
        trial!("prebind-race", prebind_race::check_races),
        trial!("controller-killed", controller_crash::killed),
        trial!("frozen-leader", frozen_leader::check_takeover),
        trial!("driver-killed", driver_crash::killed),
        trial!("driver-prepare-cancelled", driver_crash::pod_deleted_during_prepare),
        trial!("rbac", admission::enforce_rbac),
        trial!("plugin-roles", plugin::read_by_roles),
        trial!("fence-rule", fence::check_rule),
        trial!("no-execute", no_execute::evicts_by_toleration),
        trial!("mig", mig::serves_mig_devices),
        trial!("placeholder-pods", placeholder_pods::ask_for_a_node),
        trial!("managed-drivers", managed_drivers::gpu_beside_nic),
        trial!("gpu-drain", gpu_drain::moves_shares),
        trial!("defragmentation", defragmentation::moves_a_share),
        trial!("gpu-preemption", gpu_preemption::evicts_unimportant),
        trial!("group-preemption", gpu_preemption::evicts_whole_group),
        trial!("gpu-recovery", gpu_recovery::evicts_from_unhealthy),
        trial!("resize-running", resize::changes_running_container),
        trial!("least-loaded", load::places_by_load),
        trial!("group-refused", groups::wait_for_all),
        trial!("group-topology", groups::require_one_rack),
        trial!("dialects", dialects::run_unchanged),
        trial!("webhook-down", dialects::lose_webhook),
        trial!("migration", migration::there_and_back),
        trial!("unclaimed-gpus", unclaimed_gpus::hide),
        trial!("quota-refused", quotas::refuse),
        trial!("forged-grant-by-image", tampering::forge_grant_by_image),
        trial!("executables", third_party_programs::check_programs),
        trial!("host-pid", host_pid::check_translation),
        trial!("intercept-modes", intercept_modes::switched_and_restored),
        trial!("full-dev", tampering::fill_dev),
        trial!("user-namespaces", tampering::forge_in_user_namespace),
        trial!("helm-upgrade", release::upgraded),
        trial!("helm-uninstall", release::removed),
        trial!("stock-mode", stock::switched_and_restored),
        trial!("oversubscription", oversubscription::switched_and_restored),
        trial!("oversubscribed-cores", oversubscription::cores),
        trial!("mps", mps::switched_and_restored),
        trial!("control-plane-restarts", control_plane::restarted),
        trial!("node-drained", node_drain::moves_all_pods),
        trial!("out-of-service", out_of_service::frees_devices),
        trial!("node-rebooted", reboot::restores_shares),
        trial!("graceful-shutdown", graceful_shutdown::moves_pods),
        trial!("pod-group-objects", pod_group_objects::make_groups),
        trial!("node-deleted", node::delete_and_register),
        trial!("driver-two-instances", driver_update::two_instances),
        trial!("driver-cdi-file-deleted", driver_update::cdi_file_deleted),
        trial!("driver-removed-first", driver_update::removed_before_pods),
    ]
}

/// Returns the trials with API server faults, one plan per seed, and wrong clocks. They need a
/// simulated cluster served with `--clocks`.
pub fn on_faulty_cluster(seeds: Vec<u64>) -> Vec<Trial> {
    vec![
        trial!("wrong-clock", clock::check_wrong_clock),
        trial!("chaos", |test_bed| chaos::run(test_bed, seeds)),
    ]
}

/// Returns the trials that must run last.
pub fn final_checks() -> Vec<Trial> {
    vec![trial!("no-residue", residue::check)]
}
