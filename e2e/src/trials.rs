//! Trials: what scenarios cannot say, since it needs hands on the machines or an eye on every moment.

mod bench;
mod controller;
mod crowd;
mod gpu;
mod neighbour;
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

/// All trials against one cluster.
pub fn all(cluster: &Cluster) -> Vec<Trial<'static>> {
    let bench = |name: &str| Bench::new(cluster, name);
    macro_rules! trial {
        ($name:literal, $run:expr) => {{
            let bench = bench($name);
            Trial {
                name: concat!("trial/", $name).to_owned(),
                run: Box::pin(async move { bench.run($run).await }),
            }
        }};
    }
    vec![
        trial!("driver-restart", restart::driver),
        trial!("kubelet-restart", restart::kubelet),
        trial!("containerd-restart", restart::containerd),
        trial!("controller-stopped", controller::stopped),
        trial!("lost-gpu", gpu::lost),
        trial!("neighbours-pool", neighbour::refused),
        trial!("room", room::measured),
        trial!("hundred-pods", crowd::hundred),
        trial!("no-residue", residue::none),
    ]
}
