//! `kubectl tessera cordon | uncordon | drain gpu`: takes GPUs out of service, and back.
//!
//! ```text
//! NODE/GPU --tree--> device --cordon--> DeviceTaintRule --> no new claims (controller)
//!                      |
//!                      '--drain--> pods of its claims --> Eviction API (PodDisruptionBudgets)
//! ```
//!
//! A cordon is one DeviceTaintRule with the taint `gpu.tessera.dev/cordoned:NoSchedule`, which the
//! controller honours. The pods that use the GPU stay, unless it is drained.

mod cordon;
mod drain;
mod error;
mod gpu;

use std::collections::BTreeSet;

use serde::Serialize;
use tessera_api::names::CORDONED_TAINT_KEY;

use crate::output::count;
use crate::tree::{GpuShare, GpuTree, GpuView, NodeView};
pub use cordon::{CordonChange, Cordons};
pub(crate) use drain::refuse_unmanaged;
pub use drain::{Drain, DrainOptions, DrainReport, GpuClaim};
pub use error::GpuError;
pub use gpu::{GpuName, InvalidGpuName, TargetGpu, UnknownGpu, resolve};

/// The effect of a command on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuChange {
    /// The GPU.
    #[serde(flatten)]
    pub gpu: TargetGpu,
    /// The effect.
    pub change: CordonChange,
    /// True if nothing was changed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

impl GpuChange {
    /// Returns the effect on a GPU; in a dry run, the one that the command would have.
    #[must_use]
    pub fn new(gpu: TargetGpu, change: CordonChange, dry_run: bool) -> Self {
        Self { gpu, change, dry_run }
    }

    fn text(&self) -> String {
        let suffix = if self.dry_run { " (dry run)" } else { "" };
        format!("gpu {} {}{suffix}", self.gpu, self.change.text())
    }
}

/// Returns one line for each GPU.
#[must_use]
pub fn changes_text(changes: &[GpuChange]) -> String {
    changes.iter().map(|change| change.text() + "\n").collect()
}

/// Returns the result of a drain as text.
#[must_use]
pub fn report_text(report: &DrainReport) -> String {
    let pods = count(report.evicted.len(), "pod");
    let gpus = report.gpus.iter().map(|change| match change.dry_run {
        false => format!("gpu {} drained\n", change.gpu),
        true => format!("gpu {} would be drained (dry run)\n", change.gpu),
    });
    let is_dry_run = report.gpus.iter().any(|change| change.dry_run);
    let evicted = if is_dry_run { "would be evicted" } else { "evicted" };
    let list: String = report.evicted.iter().map(|pod| format!("  {pod}\n")).collect();
    gpus.collect::<String>() + &format!("{pods} {evicted}\n{list}")
}

/// Returns a line for each GPU that has other taints than that of a cordon.
#[must_use]
pub fn other_taints(tree: &GpuTree, changes: &[GpuChange]) -> Vec<String> {
    let gpus = tree.nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
    let line = |(node, gpu): (&NodeView, &GpuView)| {
        let is_named = changes
            .iter()
            .any(|change| change.gpu.node == node.name && change.gpu.device == gpu.device);
        let is_other = |taint: &&String| !taint.starts_with(CORDONED_TAINT_KEY);
        let others: Vec<&str> = gpu.taints.iter().filter(is_other).map(String::as_str).collect();
        (is_named && !others.is_empty()).then(|| {
            format!("gpu {}/{} still has the taint {}", node.name, gpu.device, others.join(", "))
        })
    };
    gpus.filter_map(line).collect()
}

/// Returns the claims that are allocated on these GPUs.
#[must_use]
pub fn claims_on(tree: &GpuTree, gpus: &[TargetGpu]) -> BTreeSet<GpuClaim> {
    let of_node = |target: &TargetGpu| tree.nodes.iter().find(|node| node.name == target.node);
    let shares = gpus.iter().flat_map(|target| {
        let views = of_node(target).into_iter().flat_map(|node| &node.gpus);
        views.filter(|view| view.device == target.device).flat_map(|view| &view.shares)
    });
    let claim = |share: &GpuShare| GpuClaim {
        namespace: share.namespace.clone(),
        name: share.claim.clone(),
        orphans: if share.claim_deleted { share.pods.clone() } else { Vec::new() },
    };
    shares.map(claim).collect()
}
