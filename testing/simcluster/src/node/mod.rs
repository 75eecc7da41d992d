//! One node: a fake kubelet and a fake container runtime.
//!
//! ```text
//! API server  <--watch pods, patch status, delete--  kubelet/   one worker per pod
//!                                     |  real gRPC over real unix sockets
//!                                     |    plugins_registry/*.sock   registration
//!                                     |    <endpoint of the plugin>  prepare, unprepare, health
//!                                     v
//!                                   container/ namespaces, a tmpfs root, CDI edits
//! API server  --GET /containerLogs/<namespace>/<pod>/<container>-->  kubelet/logs.rs
//! ```
//!
//! As in a real cluster, the API server finds a pod's log through its Node object: the address
//! `InternalIP` and the port `status.daemonEndpoints.kubeletEndpoint.Port`, over plain HTTP here.
//!
//! The runtime outlives the kubelet, so that a kubelet can be restarted while containers run.
//!
//! One point is more permissive than runc: in a user namespace, runc looks for a device node on the
//! host at its path in the container, whatever `hostPath` says.
//!
//! Simplified: no probes, no resource limits, no volumes but `emptyDir`, no network namespaces, no
//! CDI hooks (a spec with hooks is refused), and a short, constant restart back-off.

pub mod container;
pub mod kubelet;
pub mod namespaces;
