//! gRPC services between the kubelet and a DRA driver.
//!
//! ```text
//! kubelet --GetInfo, NotifyRegistrationStatus--> plugins_registry/<driver>@reg.sock   registration
//! kubelet --NodePrepareResources, Unprepare----> plugins/<driver>/dra.sock            dra_v1, dra_v1beta1
//! kubelet --NodeWatchResources (stream)--------> plugins/<driver>/dra.sock            health_v1, health_v1alpha1
//! ```
//!
//! The code is generated at build time from `proto/*.proto`, which follow Kubernetes 1.37: package,
//! service and field numbers are the contract. Clients and servers are generated for each service.
//!
//! gRPC over a Unix socket has an `:authority`, and the `http` crate refuses one with a `%` in the
//! host: if a client sends the escaped socket path, its stream is reset before any handler runs.
//! The kubelet sends `localhost` to the DRA socket, and the escaped path to the registration socket
//! (observed on 1.37.1). The registration socket therefore has an `@` in its file name: the part
//! before it is the user part, in which `%` is legal. `tests/authority.rs` checks this.

/// Plugin registration service (`pluginregistration.Registration`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// DRA service v1 (`k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod dra_v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// DRA service v1beta1 (`k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod dra_v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// Device health service v1 (`v1.DRAResourceHealth`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod health_v1 {
    tonic::include_proto!("v1");
}

/// Device health service v1alpha1 (`v1alpha1.DRAResourceHealth`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod health_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// Plugin type of a DRA driver (`PluginInfo.type`).
pub const PLUGIN_TYPE: &str = "DRAPlugin";

/// Name of [`dra_v1`] in `PluginInfo.supported_versions`.
pub const SUPPORTS_DRA_V1: &str = "v1.DRAPlugin";
/// Name of [`dra_v1beta1`] in `PluginInfo.supported_versions`.
pub const SUPPORTS_DRA_V1BETA1: &str = "v1beta1.DRAPlugin";
/// Name of [`health_v1`] in `PluginInfo.supported_versions`.
pub const SUPPORTS_HEALTH_V1: &str = "v1.DRAResourceHealth";
/// Name of [`health_v1alpha1`] in `PluginInfo.supported_versions`.
pub const SUPPORTS_HEALTH_V1ALPHA1: &str = "v1alpha1.DRAResourceHealth";
