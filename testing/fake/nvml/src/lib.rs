//! A fake `libnvidia-ml.so.1` over the fake world.
//!
//! It has NVIDIA's symbol names, struct layouts and error codes, so that programs written for the
//! real library run on it unchanged. What it says comes from [`tessera_fake_world::Machine`]: the
//! world file, the control file (read again at every call when it has changed), and what the fake
//! CUDA's processes hold. Functions that are not modelled answer `NVML_ERROR_NOT_SUPPORTED`; NULL
//! where a pointer must be answers `NVML_ERROR_INVALID_ARGUMENT`.
//!
//! | module | functions |
//! |---|---|
//! | `library` | init, shutdown, error strings, versions |
//! | `identity` | counting and finding devices, and what they are |
//! | `memory` | memory and the processes that hold it |
//! | `state` | utilisation, clocks, power, modes, ECC, field values |
//! | `topology` | PCIe distance, P2P, CPU and memory affinity |
//! | `nvlink` | NVLinks and what is at their other end |
//! | `events` | event sets: XID and ECC events, once each |
//! | `stubs` | everything else that NVIDIA's library exports |

mod abi;
mod events;
mod identity;
mod library;
mod memory;
mod nvlink;
mod state;
mod topology;

/// Functions that are not modelled.
mod stubs {
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
