//! The DRA kubelet plugin: one per node.
//!
//! ```text
//! GpuLibrary --inventory--> HardwareState --publisher--> ResourceSlices of this node
//!                 |                \
//!                 |                 \--prepare--> plan, journal, steps -> grants, ledgers, CDI
//!                 \--HealthReport--> kubelet           ^
//!                                       NodePrepareResources <-- kubelet
//! ```
//!
//! Tasks and threads, with the names under which [`Driver::failed`](driver::Driver::failed) reports
//! an unexpected end:
//!
//! | name | module | purpose |
//! |---|---|---|
//! | thread `gpus` | [`inventory`] | reads the hardware; sends `HardwareState` and `HealthReport` |
//! | `gpu-stall-watch` | [`inventory`] | taints the GPUs if the thread `gpus` hangs in NVML |
//! | `other-allocators` | [`other_allocators`] | finds other allocators of the GPUs |
//! | `publisher` | [`publisher`] | the only writer of this node's ResourceSlices |
//! | `claim-audit` | [`audit`] | compares the journal with the API server's claims, finds orphans |
//! | `resizes` | [`resize`] | changes the sizes of prepared shares |
//! | `usage-audit` | [`usage`] | compares ledgers with the processes that NVML reports |
//! | `mps-watch` | [`mps::watch`] | reports the state of MPS control daemons |
//! | `arbitration` | [`arbitration`] | schedules compute of shares |
//! | thread `host-pids` | [`host_pids`] | PID server for processes of containers |
//! | `node-events`, `pod-events`, `claim-events` | [`events`] | writes events on Node and pods |
//! | `gauges` | [`driver`] | metrics of the journal and the registration |
//! | threads `http`, `health` | [`http`] | metrics and health checks |
//! | `registration-server`, `plugin-server` | [`kubelet`] | gRPC servers |
//!
//! Each claim of a call is prepared in a task of its own ([`prepare`]), which the call does not
//! cancel. The journal ([`state::journal`]) is shared by tasks and by other instances of the
//! driver, under one lock.
//!
//! A restart changes nothing for running pods: all state is in files, which [`prepare::repair`]
//! makes match the journal at start.
#![forbid(unsafe_code)]

pub mod arbitration;
pub mod args;
pub mod audit;
pub mod base_spec;
mod clock;
pub mod context_memory;
pub mod driver;
pub mod events;
pub mod fault;
pub mod host_pids;
pub mod http;
pub mod intercept;
pub mod inventory;
pub mod kubelet;
pub mod metrics;
pub mod mode;
pub mod mps;
pub mod other_allocators;
pub mod prepare;
pub mod publisher;
pub mod resize;
pub mod run;
pub mod slices;
pub mod state;
pub mod usage;
