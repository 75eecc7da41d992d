//! Trials: what scenarios cannot say, since it needs hands on the machines or an eye on every moment.

mod bench;
mod controller;
mod crowd;
mod gpu;
mod neighbour;
mod other_allocator;
mod overcommit;
mod residue;
mod restart;
mod room;

pub mod ledger;

use kube::{Client, Config};

pub use bench::Bench;

use crate::harness::Trial;
use crate::operations::Operations;

/// A cluster to run on.
#[derive(Clone)]
pub struct Cluster {
    config: Config,
    client: Client,
    operations: Option<Operations>,
}

impl Cluster {
    /// The cluster of that configuration, and what acts on its machines.
    ///
    /// # Errors
    /// The configuration makes no client.
    pub fn new(config: Config, operations: Option<Operations>) -> Result<Self, kube::Error> {
        // With several linked in, rustls does not choose. An error means that the process has chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::try_from(config.clone())?;
        Ok(Self { config, client, operations })
    }

    /// The administrator.
    pub fn client(&self) -> &Client {
        &self.client
    }
}

/// One trial in a namespace of its own.
macro_rules! trial {
    ($cluster:expr, $name:literal, $run:expr) => {{
        let bench = Bench::new($cluster, $name);
        Trial {
            name: concat!("trial/", $name).to_owned(),
            run: Box::pin(async move { bench.run($run).await }),
        }
    }};
}

/// The trials that any cluster can do, the stand-ins too.
pub fn all(cluster: &Cluster) -> Vec<Trial<'static>> {
    vec![
        trial!(cluster, "driver-restart", restart::driver),
        trial!(cluster, "kubelet-restart", restart::kubelet),
        trial!(cluster, "containerd-restart", restart::containerd),
        trial!(cluster, "controller-stopped", controller::stopped),
        trial!(cluster, "lost-gpu", gpu::lost),
        trial!(cluster, "gpu-recovers", gpu::recovers),
        trial!(cluster, "other-allocator-dra", other_allocator::dra_driver),
        trial!(cluster, "other-allocator-plugin", other_allocator::device_plugin),
        trial!(cluster, "neighbours-pool", neighbour::refused),
        trial!(cluster, "room", room::measured),
        trial!(cluster, "hundred-pods", crowd::hundred),
    ]
}

/// The trials that need a real Kubernetes: what they are about is left out of the stand-ins.
pub fn on_real_cluster(_cluster: &Cluster) -> Vec<Trial<'static>> {
    vec![]
}

/// What has to come after everything else.
pub fn last(cluster: &Cluster) -> Vec<Trial<'static>> {
    vec![trial!(cluster, "no-residue", residue::none)]
}
