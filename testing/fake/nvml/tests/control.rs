//! Tests of changes at run time, which each call sees.

mod node;

use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use tessera_fake_world::control::{EventKind, ForeignProcess};
use tessera_fake_world::{StatePlace, Usage, shipped};

use node::Node;

const GIB: u64 = 1 << 30;

fn registered<'nvml>(nvml: &'nvml nvml_wrapper::Nvml, gpus: &[u32]) -> EventSet<'nvml> {
    let set = nvml.create_event_set().expect("a set");
    gpus.iter().fold(set, |set, &gpu| {
        let device = nvml.device_by_index(gpu).expect("a GPU");
        let kinds = device.supported_event_types().expect("event types");
        assert!(kinds.contains(EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR));
        device.register_events(kinds, set).expect("registration")
    })
}

#[test]
fn lost_gpu_fails_every_call_and_others_work() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let nvml = node.nvml();
    let (lost, healthy) = (nvml.device_by_index(2).unwrap(), nvml.device_by_index(3).unwrap());
    lost.memory_info().unwrap();
    node.control.update(|control| control.gpu_mut(&node.world.gpus[2].uuid).lost = true).unwrap();
    assert!(matches!(lost.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(lost.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(2), Err(NvmlError::GpuLost)));
    assert_eq!(nvml.device_count().unwrap(), 8);
    healthy.memory_info().unwrap();
    node.control.update(|control| control.gpus.clear()).unwrap();
    lost.memory_info().unwrap();
}

#[test]
fn events_after_registration_are_delivered_once_in_order() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let (nvml, uuid) = (node.nvml(), node.world.gpus[1].uuid.as_str());
    node.control.update(|control| control.push_event(uuid, EventKind::Xid(13))).unwrap();
    let set = registered(&nvml, &[0, 1]);
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    node.control
        .update(|control| {
            control.push_event(&node.world.gpus[5].uuid, EventKind::Xid(48));
            control.push_event(uuid, EventKind::Xid(79));
            control.push_event(uuid, EventKind::EccDoubleBit);
        })
        .unwrap();
    let event = set.wait(1000).unwrap();
    assert_eq!(event.event_type, EventTypes::CRITICAL_XID_ERROR);
    assert!(matches!(event.event_data, Some(XidError::Value(79))), "{:?}", event.event_data);
    assert_eq!(event.device.uuid().unwrap(), uuid);
    assert_eq!(set.wait(1000).unwrap().event_type, EventTypes::DOUBLE_BIT_ECC_ERROR);
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
}

#[test]
fn waiting_call_returns_on_event() {
    let node = Node::new(shipped::T4_1);
    let nvml = node.nvml();
    let set = registered(&nvml, &[0]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            node.control
                .update(|control| control.push_event(&node.world.gpus[0].uuid, EventKind::Xid(31)))
        });
        let before = Instant::now();
        set.wait(600_000).unwrap();
        assert!(before.elapsed() < Duration::from_secs(300));
    });
}

#[test]
fn waiting_reports_lost_gpu_after_its_events() {
    let node = Node::new(shipped::T4_1);
    let nvml = node.nvml();
    let set = registered(&nvml, &[0]);
    node.control
        .update(|control| {
            control.push_event(&node.world.gpus[0].uuid, EventKind::Xid(79));
            control.gpu_mut(&node.world.gpus[0].uuid).lost = true;
        })
        .unwrap();
    set.wait(0).unwrap();
    assert!(matches!(set.wait(60_000), Err(NvmlError::GpuLost)));
}

#[test]
fn memory_counts_foreign_and_own_processes() {
    let node = Node::new(shipped::A100_4_PCIE);
    let (nvml, gpu) = (node.nvml(), &node.world.gpus[1]);
    let device = nvml.device_by_index(1).unwrap();
    let all = device.memory_info().unwrap();
    node.control
        .update(|control| {
            let process =
                ForeignProcess { pid: 4_000_000, used_mib: 2048, name: "trainer".to_owned() };
            control.gpu_mut(&gpu.uuid).processes.push(process);
        })
        .unwrap();
    let state = node.control.path().with_file_name("state");
    let usage = Usage::open(&StatePlace::Shared(state), &node.world).unwrap();
    usage.charge(1, 3 * GIB, 80 * GIB).unwrap();
    let memory = device.memory_info().unwrap();
    assert_eq!((memory.used, memory.free, memory.total), (5 * GIB, all.free - 5 * GIB, all.total));
    let processes = device.running_compute_processes().unwrap();
    let held: Vec<_> = processes
        .iter()
        .map(|process| {
            (
                process.pid,
                matches!(process.used_gpu_memory, UsedGpuMemory::Used(bytes) if bytes % GIB == 0),
            )
        })
        .collect();
    assert_eq!(held, [(4_000_000, true), (std::process::id(), true)]);
    assert_eq!(nvml.sys_process_name(4_000_000, 64).unwrap(), "trainer");
    assert_eq!(nvml.device_by_index(0).unwrap().memory_info().unwrap().used, 0);
}

#[test]
fn counts_ecc_errors() {
    let node = Node::new(shipped::A100_4_PCIE);
    let nvml = node.nvml();
    node.control
        .update(|control| control.gpu_mut(&node.world.gpus[0].uuid).ecc_uncorrected = 3)
        .unwrap();
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).unwrap(), 3);
}

#[test]
fn initialisation_fails_without_driver() {
    let node = Node::new(shipped::T4_1);
    node.control.update(|control| control.driver_not_loaded = true).unwrap();
    assert!(matches!(node.try_nvml(), Err(NvmlError::DriverNotLoaded)));
}
