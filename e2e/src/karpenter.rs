//! A trial of Karpenter: it adds nodes for pods that wait for GPUs of Tessera, and removes them.
//!
//! ```text
//! pod --kube-scheduler: Unschedulable--> Karpenter --kwok provider--> Node object
//!                                                                       | hosts: slices, ready
//! pod runs <--kube-scheduler binds-- claim <--tessera-controller-- ResourceSlice
//! ```
//!
//! Real: Karpenter, the control plane, tessera-controller. Played by the trial: the driver and the
//! kubelet of each node.

mod hosts;
mod trial;

pub use hosts::template_slices;
pub use trial::run;
