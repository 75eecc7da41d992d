//! A fake `libnvidia-ml.so.1` over the fake world.
//!
//! It has NVIDIA's symbol names, struct layouts and error codes, so that programs for the real
//! library run on it unchanged. Its data comes from [`tessera_fake_world::Machine`]: the world
//! file, the control file (read again at each call if it has changed), and the memory of the fake
//! CUDA's processes. Functions that are not modelled return `NVML_ERROR_NOT_SUPPORTED`; NULL
//! pointers return `NVML_ERROR_INVALID_ARGUMENT`.
//!
//! | module | functions |
//! |---|---|
//! | `library` | init, shutdown, error strings, versions |
//! | `identity` | device lookup and identity |
//! | `mig` | MIG profiles, GPU instances, compute instances, MIG devices |
//! | `memory` | memory and the processes that hold it |
//! | `state` | utilisation, clocks, power, modes, ECC, field values |
//! | `topology` | PCIe distance, P2P, CPU and memory affinity |
//! | `nvlink` | NVLinks and their remote ends |
//! | `events` | event sets for XID and ECC events |
//! | `stubs` | all other exports of NVIDIA's library |

mod abi;
mod events;
mod identity;
mod library;
mod memory;
mod mig;
mod nvlink;
mod state;
mod topology;

/// Stubs of functions that are not modelled.
mod stubs {
    include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
}
