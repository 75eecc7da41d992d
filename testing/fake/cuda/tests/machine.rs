//! Tests of a program on the fake driver: GPUs, memory, and the time of work.

mod driver;

use std::ffi::CStr;

use driver::{Driver, MIB, out};
use tessera_fake_world::{Machine, shipped};

const OUT_OF_MEMORY: u32 = 2;
const INVALID_DEVICE: u32 = 101;
const DEVICE_UNAVAILABLE: u32 = 46;
const INVALID_VALUE: u32 = 1;
const INVALID_HANDLE: u32 = 400;
const INVALID_CONTEXT: u32 = 201;
const NOT_READY: u32 = 600;

#[test]
fn devices_match_the_world() {
    let driver = Driver::begin(shipped::A100_4_PCIE);
    let mut count = 0_i32;
    driver.ok("cuDeviceGetCount", [out(&mut count)]);
    assert_eq!(count, 4);
    for gpu in &driver.node.world.gpus {
        let mut name = [0_u8; 96];
        driver.ok("cuDeviceGetName", [out(&mut name), 96, gpu.index]);
        let name = CStr::from_bytes_until_nul(&name).expect("terminated").to_str().expect("text");
        assert_eq!(name, gpu.model.name);

        let mut uuid = [0_u8; 16];
        driver.ok("cuDeviceGetUuid_v2", [out(&mut uuid), gpu.index]);
        let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, gpu.uuid.replace("GPU-", "").replace('-', ""));

        let mut total = 0_u64;
        driver.ok("cuDeviceTotalMem_v2", [out(&mut total), gpu.index]);
        assert_eq!(total, gpu.model.usable_bytes());
        let mut processors = 0_i32;
        driver.ok("cuDeviceGetAttribute", [out(&mut processors), 16, gpu.index]);
        assert_eq!(processors as u32, gpu.model.multiprocessors);

        let mut id = [0_u8; 32];
        driver.ok("cuDeviceGetPCIBusId", [out(&mut id), 32, gpu.index]);
        let mut found = -1_i32;
        driver.ok("cuDeviceGetByPCIBusId", [out(&mut found), id.as_ptr() as usize]);
        assert_eq!(found as usize, gpu.index);
    }
    assert_eq!(driver.call("cuDeviceGet", [out(&mut count), 4]), INVALID_DEVICE);
}

#[test]
fn memory_is_limited_and_contexts_use_memory() {
    let driver = Driver::begin(shipped::T4_1);
    let model = driver.node.world.gpus[0].model.clone();
    let (free, total) = driver.memory();
    assert_eq!((free, total), (model.usable_bytes() - model.context_bytes(), model.usable_bytes()));
    let (mut pointer, mut more) = (0_u64, 0_u64);
    driver.ok("cuMemAlloc_v2", [out(&mut pointer), free as usize]);
    assert_eq!(driver.call("cuMemAlloc_v2", [out(&mut more), 1]), OUT_OF_MEMORY);
    assert_eq!(
        driver.call("cuCtxCreate_v2", [out(&mut more), 0, 0]),
        OUT_OF_MEMORY,
        "no room for a context"
    );
    driver.ok("cuMemFree_v2", [pointer as usize]);
    assert_eq!(driver.memory().0, free);
    assert_eq!(driver.call("cuMemFree_v2", [pointer as usize]), INVALID_VALUE, "freed twice");

    driver.ok("cuMemAlloc_v2", [out(&mut pointer), MIB as usize]);
    driver.ok("cuDevicePrimaryCtxRelease_v2", [0]);
    assert_eq!(
        driver.call("cuMemGetInfo_v2", [out(&mut more), out(&mut pointer)]),
        INVALID_CONTEXT
    );
    driver.context(0);
    assert_eq!(driver.memory().0, free, "freed with the context");
}

#[test]
fn allocations_are_visible_to_the_whole_machine() {
    let driver = Driver::begin(shipped::H100_8_NVSWITCH);
    let mut pointer = 0_u64;
    driver.ok("cuMemAlloc_v2", [out(&mut pointer), (3 * MIB) as usize]);
    let gpu = &driver.node.world.gpus[0];
    let world = driver.node.driver_root.join("usr/share/nvidia/tessera-fake/world.yaml");
    let location = tessera_fake_world::Location::of_world(&world, None).expect("a world");
    let machine = Machine::open_at(&location).expect("the same machine");
    let held = gpu.model.context_bytes() + 3 * MIB;
    assert_eq!(machine.memory(gpu).used, held);
    let processes = machine.processes(gpu);
    assert_eq!(
        processes.iter().map(|process| (process.pid, process.bytes)).collect::<Vec<_>>(),
        [(std::process::id(), held)]
    );

    driver.node.control.update(|control| control.gpu_mut(&gpu.uuid).lost = true).expect("written");
    assert_eq!(driver.call("cuMemAlloc_v2", [out(&mut pointer), 512]), DEVICE_UNAVAILABLE);
}

/// Name of a kernel that runs longer than any test.
const ENDLESS: &str = "spin_for_1000s";

/// Returns the milliseconds that two kernels with so many blocks take in two streams.
fn milliseconds_of_two(driver: &Driver, name: &str, blocks: usize) -> f32 {
    let function = driver.function(name);
    let [mut first, mut second, mut begin, mut end] = [0_usize; 4];
    driver.ok("cuStreamCreate", [out(&mut first), 1]);
    driver.ok("cuStreamCreate", [out(&mut second), 1]);
    driver.ok("cuEventCreate", [out(&mut begin), 0]);
    driver.ok("cuEventCreate", [out(&mut end), 0]);
    driver.ok("cuEventRecord", [begin, first]);
    driver.launch_blocks(function, blocks, first);
    driver.launch_blocks(function, blocks, second);
    driver.ok("cuEventRecord", [end, second]);
    driver.ok("cuEventSynchronize", [end]);
    driver.ok("cuStreamQuery", [second]);
    let mut milliseconds = 0_f32;
    driver.ok("cuEventElapsedTime", [out(&mut milliseconds), begin, end]);
    milliseconds
}

#[test]
fn kernels_run_beside_each_other_as_far_as_they_fit() {
    let driver = Driver::begin(shipped::T4_1);
    let milliseconds = milliseconds_of_two(&driver, "spin_for_30ms", 10_000);
    assert!(milliseconds >= 60.0, "two kernels of 30 ms that fill the GPU: {milliseconds}");
    let milliseconds = milliseconds_of_two(&driver, "spin_for_400ms", 1);
    assert!((400.0..800.0).contains(&milliseconds), "two small ones of 400 ms: {milliseconds}");
}

#[test]
fn work_under_way_is_not_ready() {
    let driver = Driver::begin(shipped::T4_1);
    let [mut stream, mut end] = [0_usize; 2];
    driver.ok("cuStreamCreate", [out(&mut stream), 1]);
    driver.ok("cuEventCreate", [out(&mut end), 0]);
    driver.launch(driver.function(ENDLESS), stream);
    driver.ok("cuEventRecord", [end, stream]);
    assert_eq!(driver.call("cuStreamQuery", [stream]), NOT_READY);
    assert_eq!(driver.call("cuEventQuery", [end]), NOT_READY);
}

#[test]
fn stream_waits_for_event_of_other_stream() {
    let driver = Driver::begin(shipped::T4_1);
    let [mut first, mut second, mut event] = [0_usize; 3];
    driver.ok("cuStreamCreate", [out(&mut first), 1]);
    driver.ok("cuStreamCreate", [out(&mut second), 1]);
    driver.ok("cuEventCreate", [out(&mut event), 2]);
    driver.launch(driver.function("spin_for_40ms"), first);
    driver.ok("cuEventRecord", [event, first]);
    driver.ok("cuStreamWaitEvent", [second, event, 0]);
    driver.ok("cuStreamSynchronize", [second]);
    driver.ok("cuStreamQuery", [first]);
    driver.launch(driver.function(ENDLESS), first);
    driver.ok("cuEventRecord", [event, first]);
    driver.ok("cuStreamQuery", [second]);
    driver.ok("cuStreamWaitEvent", [second, event, 0]);
    assert_eq!(driver.call("cuStreamQuery", [second]), NOT_READY);
    let mut milliseconds = 0_f32;
    let untimed = driver.call("cuEventElapsedTime", [out(&mut milliseconds), event, event]);
    assert_eq!(untimed, INVALID_HANDLE, "created without timing");
}

#[test]
fn copies_beyond_allocations_fail() {
    let driver = Driver::begin(shipped::T4_1);
    let (mut pointer, host) = (0_u64, vec![0_u8; 4096]);
    driver.ok("cuMemAlloc_v2", [out(&mut pointer), 4096]);
    let (device, host) = (pointer as usize, host.as_ptr() as usize);
    driver.ok("cuMemcpyHtoD_v2", [device, host, 4096]);
    driver.ok("cuMemcpyDtoH_v2", [host, device + 4000, 96]);
    driver.ok("cuMemsetD32_v2", [device, 7, 1024]);
    assert_eq!(driver.call("cuMemcpyHtoD_v2", [device, host, 4097]), INVALID_VALUE);
    assert_eq!(driver.call("cuMemsetD8_v2", [device + 1, 0, 4096]), INVALID_VALUE);
    assert_eq!(driver.call("cuMemcpyDtoD_v2", [device, host, 16]), INVALID_VALUE, "not on the GPU");
}

#[test]
fn host_memory_known_to_the_gpu_is_filled_and_copied() {
    let driver = Driver::begin(shipped::T4_1);
    let (mut pinned, mut plain) = (0_u64, vec![0_u8; 4096]);
    driver.ok("cuMemHostAlloc", [out(&mut pinned), 4096, 0]);
    driver.ok("cuMemsetD32_v2", [pinned as usize, 7, 1024]);
    driver.ok("cuMemcpyDtoH_v2", [out(&mut plain[0]), pinned as usize, 4096]);
    assert_eq!(driver.call("cuMemsetD32_v2", [pinned as usize, 7, 1025]), INVALID_VALUE);
    driver.ok("cuMemFreeHost", [pinned as usize]);
    assert_eq!(driver.call("cuMemsetD32_v2", [pinned as usize, 7, 1024]), INVALID_VALUE);
}

#[test]
fn mapped_memory_has_the_attributes_of_its_mapping() {
    const MAPPED: usize = 4 << 20;
    let driver = Driver::begin(shipped::T4_1);
    let (mut handle, mut address) = (0_u64, 0_u64);
    // Pinned memory of device 0.
    let properties = [1_u64, 1, 0, 0];
    let properties = properties.as_ptr() as usize;
    driver.ok("cuMemCreate", [out(&mut handle), MAPPED, properties, 0]);
    driver.ok("cuMemAddressReserve", [out(&mut address), MAPPED * 2, 0, 0, 0]);
    let inside = address as usize + 100;
    let mut device = -1_i32;
    let device_of =
        |device: &mut i32| driver.call("cuPointerGetAttribute", [out(device), 9, inside]);
    assert_eq!(device_of(&mut device), INVALID_VALUE, "reserved only");
    driver.ok("cuMemMap", [address as usize, MAPPED, 0, handle as usize, 0]);
    assert_eq!((device_of(&mut device), device), (0, 0));
    let (mut base, mut bytes) = (0_u64, 0_u64);
    driver.ok("cuMemGetAddressRange_v2", [out(&mut base), out(&mut bytes), inside]);
    assert_eq!((base, bytes), (address, MAPPED as u64));
    driver.ok("cuMemUnmap", [address as usize, MAPPED]);
    assert_eq!(device_of(&mut device), INVALID_VALUE);
}

#[test]
fn invalid_handles_are_rejected() {
    let driver = Driver::begin(shipped::T4_1);
    let garbage = 0x1234_5678;
    assert_eq!(driver.call("cuLaunchKernel", [garbage, 1, 1, 1, 1, 1, 1]), INVALID_HANDLE);
    assert_eq!(driver.call("cuStreamSynchronize", [garbage]), INVALID_HANDLE);
    assert_eq!(driver.call("cuEventDestroy_v2", [garbage]), INVALID_HANDLE);
    assert_eq!(driver.call("cuCtxSetCurrent", [garbage]), INVALID_CONTEXT);
    assert_eq!(driver.call("cuArrayDestroy", [garbage]), INVALID_HANDLE);
    let function = driver.function("kernel");
    assert_eq!(
        driver.call("cuLaunchKernel", [function, 1, 1, 1, 2048, 1, 1]),
        INVALID_VALUE,
        "too many threads"
    );
}
