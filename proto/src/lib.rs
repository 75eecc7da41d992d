//! The gRPC that the kubelet speaks with a DRA driver.
//!
//! ```text
//! kubelet --GetInfo, NotifyRegistrationStatus--> plugins_registry/<driver>@reg.sock   registration
//! kubelet --NodePrepareResources, Unprepare----> plugins/<driver>/dra.sock            dra_v1, dra_v1beta1
//! kubelet --NodeWatchResources (stream)--------> plugins/<driver>/dra.sock            health_v1, health_v1alpha1
//! ```
//!
//! Generated at build time from `proto/*.proto`, which are written from the facts of Kubernetes
//! 1.37: package, service and field numbers are the contract. Clients and servers are generated for
//! each.
//!
//! gRPC over a unix socket carries an `:authority`, and the `http` crate refuses one with a `%` in
//! the host: a client that sends the escaped socket path gets its stream reset before any handler
//! runs. The kubelet sends `localhost` to the DRA socket, and the escaped path to the registration
//! socket (seen on 1.37.1). So that one has an `@` in its file name: what stands before it is the
//! user part, where `%` is legal. `tests/authority.rs` holds this.
#![forbid(unsafe_code)]

/// Plugin registration (`pluginregistration.Registration`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// DRA v1 (`k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod dra_v1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
}

/// DRA v1beta1 (`k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod dra_v1beta1 {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1beta1");
}

/// Device health v1 (`v1.DRAResourceHealth`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod health_v1 {
    tonic::include_proto!("v1");
}

/// Device health v1alpha1 (`v1alpha1.DRAResourceHealth`).
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub mod health_v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// The plugin type that a DRA driver registers as (`PluginInfo.type`).
pub const PLUGIN_TYPE: &str = "DRAPlugin";

/// What `PluginInfo.supported_versions` calls [`dra_v1`].
pub const SUPPORTS_DRA_V1: &str = "v1.DRAPlugin";
/// What `PluginInfo.supported_versions` calls [`dra_v1beta1`].
pub const SUPPORTS_DRA_V1BETA1: &str = "v1beta1.DRAPlugin";
/// What `PluginInfo.supported_versions` calls [`health_v1`].
pub const SUPPORTS_HEALTH_V1: &str = "v1.DRAResourceHealth";
/// What `PluginInfo.supported_versions` calls [`health_v1alpha1`].
pub const SUPPORTS_HEALTH_V1ALPHA1: &str = "v1alpha1.DRAResourceHealth";
