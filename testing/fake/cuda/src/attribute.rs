//! Device attributes, as far as programs read them. The limits of grids and blocks are those of all
//! GPUs since Kepler.

use std::ffi::c_int;

use tessera_fake_world::Gpu;

use crate::abi::CuResult;
use crate::driver;
use crate::mps;
use crate::status::Status;

/// Highest attribute of CUDA 12.9.
const LAST: c_int = 143;

/// Returns the value of a `CUdevice_attribute`, or 0 ("not supported") if the world has no value.
pub(crate) fn value(gpu: &Gpu, attribute: c_int) -> CuResult<c_int> {
    let model = &gpu.model;
    let value = match attribute {
        // Threads of a block and its dimensions, and dimensions of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // Shared memory, constant memory, warp size, maximum pitch, registers.
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => c_int::MAX,
        12 | 82 => 64 << 10,
        13 => whole(u64::from(model.sm_clock_mhz) * 1000),
        14 | 30 => 512,
        15 | 19 | 31 | 41 | 78 | 83 | 90 | 95 | 99 => 1,
        16 => {
            let all = model.multiprocessors;
            whole(mps::client_on(gpu).map_or(all, |client| client.multiprocessors_of(all)).into())
        }
        32 => c_int::from(model.ecc),
        33 => gpu.pci.bus.into(),
        34 => gpu.pci.device.into(),
        36 => whole(u64::from(model.memory_clock_mhz) * 1000),
        37 => whole(model.memory_bus_bits.into()),
        39 => whole(model.threads_per_multiprocessor.into()),
        40 => 2,
        50 => whole(gpu.pci.domain.into()),
        51 => 32,
        75 => whole(model.compute_capability.major.into()),
        76 => whole(model.compute_capability.minor.into()),
        // Bytes of shared memory of a multiprocessor, and of a block that opts in.
        81 => 228 << 10,
        97 => 227 << 10,
        // Concurrent managed access: since Pascal.
        89 => c_int::from(model.compute_capability.major >= 6),
        // Virtual memory management, memory pools.
        102 | 115 => 1,
        106 => 32,
        // MPS enabled.
        133 if driver::cuda_number()? < 12_030 => return Err(Status::InvalidValue),
        133 => c_int::from(mps::client_on(gpu).is_some()),
        // No host NUMA node.
        131 | 134 => -1,
        _ if (1..=LAST).contains(&attribute) => 0,
        _ => return Err(Status::InvalidValue),
    };
    Ok(value)
}

fn whole(value: u64) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}
