//! The DRA kubelet plugin: one per node.
//!
//! ```text
//! GpuLibrary --inventory--> HardwareState --publisher--> ResourceSlices of this node
//!                 |                \
//!                 |                 \--prepare--> plan -> journal -> steps -> grants, ledgers, CDI specs
//!                 \--HealthReport--> kubelet           ^
//!                                       NodePrepareResources <-- kubelet
//! ```
//!
//! Tasks and channels:
//!
//! * thread `gpus` ([`inventory`]): looks at the hardware; sends `HardwareState` and `HealthReport`
//!   on watch channels.
//! * task of [`other_allocators`]: watches the Node and its slices for others that hand out the
//!   GPUs, which are then not published.
//! * task `publisher`: the only writer of this node's ResourceSlices; reads `HardwareState` and a
//!   watch of the slices.
//! * task [`audit`]: compares the journal with the API's claims; tells the publisher which GPUs
//!   orphaned claims have.
//! * task of [`usage`]: reads ledgers and compares them with what NVML says of processes; asks the
//!   hardware for nothing else.
//! * task of [`mps::watch`]: looks how the MPS control daemons are that claims need; tessera-mps
//!   runs them.
//! * task of [`host_pids`]: tells processes of containers what the host calls them.
//! * two gRPC servers ([`kubelet`]); each claim of a call is a task of its own ([`prepare`]) that
//!   the call does not cancel.
//! * the journal ([`state::journal`]) is shared by those tasks, and by other instances of the
//!   driver, under one lock.
//!
//! A restart changes nothing for running pods: all state is in files, which [`prepare::repair`]
//! brings in line at start.
#![forbid(unsafe_code)]

pub mod arbitration;
pub mod args;
pub mod audit;
pub mod base_spec;
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
pub mod run;
pub mod slices;
pub mod state;
pub mod usage;
