//! Tests of health events through the real NVML code.

mod node;

use std::time::{Duration, Instant};

use tessera_api::gpu::Health;
use tessera_api::names::GpuUuid;
use tessera_fake_world::control::{self, EventKind, ForeignProcess};
use tessera_fake_world::{StateLocation, Usage, shipped};
use tessera_gpu::{
    GpuLibrary as _, GpuProcess, HealthEvent, HealthEventKind, HealthWatch, LibraryError,
    ProcessUtilization, RecoveryAction, Xid,
};

use node::Node;

/// Timeout that is longer than any test: a test that waits this long has failed.
const LONG: Duration = Duration::from_secs(300);
const NOW: Duration = Duration::ZERO;
const GIB: u64 = 1 << 30;

fn watch(node: &Node, gpus: &[GpuUuid]) -> Box<dyn HealthWatch> {
    node.library().watch(gpus).expect("the watch starts")
}

fn event(gpu: GpuUuid, kind: HealthEventKind) -> HealthEvent {
    HealthEvent { gpu, kind }
}

impl Node {
    fn emit_event(&self, index: usize, kind: EventKind) {
        let uuid = &self.world.gpus[index].uuid;
        self.control
            .update(|control| control.push_event(uuid, kind))
            .expect("the control file is written");
    }

    fn set_hung(&self, index: usize, hung: bool) {
        let uuid = &self.world.gpus[index].uuid;
        self.control
            .update(|control| control.gpu_mut(uuid).hung = hung)
            .expect("the control file is written");
    }
}

#[test]
fn xids_and_ecc_errors_are_reported_once() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let mut watch = watch(&node, &node.uuids());
    assert_eq!(watch.wait(NOW).unwrap(), []);
    node.emit_event(2, EventKind::Xid(31));
    node.emit_event(4, EventKind::EccDoubleBit);
    let expected = [
        event(node.uuid(2), HealthEventKind::Xid(Xid(31))),
        event(node.uuid(4), HealthEventKind::DoubleBitEcc),
    ];
    assert_eq!(watch.wait(LONG).unwrap(), expected);
    assert_eq!(watch.wait(NOW).unwrap(), []);
}

#[test]
fn earlier_and_foreign_events_are_not_reported() {
    let node = Node::new(shipped::A100_4_PCIE);
    node.emit_event(0, EventKind::Xid(48));
    let mut watch = watch(&node, &[node.uuid(0)]);
    node.emit_event(1, EventKind::Xid(48));
    assert_eq!(watch.wait(NOW).unwrap(), []);
}

#[test]
fn silent_loss_is_found_and_others_stay_watched() {
    let node = Node::new(shipped::A100_4_PCIE);
    let mut watch = watch(&node, &node.uuids());
    node.lose(3);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(3), HealthEventKind::Lost)]);
    assert_eq!(watch.wait(NOW).unwrap(), [], "reported once");
    node.emit_event(0, EventKind::Xid(79));
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(0), HealthEventKind::Xid(Xid(79)))]);
    node.restore(3);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(3), HealthEventKind::Back)]);
    node.emit_event(3, EventKind::Xid(63));
    assert_eq!(
        watch.wait(LONG).unwrap(),
        [event(node.uuid(3), HealthEventKind::Xid(Xid(63)))],
        "watched again"
    );
}

#[test]
fn xid_before_loss_is_reported() {
    let node = Node::new(shipped::T4_1);
    let mut watch = watch(&node, &node.uuids());
    let uuid = node.world.gpus[0].uuid.as_str();
    node.control
        .update(|control| {
            control.push_event(uuid, EventKind::Xid(79));
            control.gpu_mut(uuid).lost = true;
        })
        .unwrap();
    let mut kinds: Vec<_> = watch.wait(LONG).unwrap().into_iter().map(|event| event.kind).collect();
    kinds.sort_by_key(|kind| *kind == HealthEventKind::Lost);
    assert_eq!(kinds, [HealthEventKind::Xid(Xid(79)), HealthEventKind::Lost]);
    // With no GPU left, waiting ends after the timeout.
    assert_eq!(watch.wait(Duration::from_millis(1)).unwrap(), []);
}

#[test]
fn gpu_lost_before_watch_is_reported_at_once() {
    let node = Node::new(shipped::A100_4_PCIE);
    node.lose(2);
    let mut watch = watch(&node, &node.uuids());
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(2), HealthEventKind::Lost)]);
}

#[test]
fn hung_gpu_is_lost_without_busy_loop() {
    let node = Node::new(shipped::A100_4_PCIE);
    let mut watch = watch(&node, &node.uuids());
    node.set_hung(1, true);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(1), HealthEventKind::Lost)]);
    let (begun, timeout) = (Instant::now(), Duration::from_millis(200));
    assert_eq!(watch.wait(timeout).unwrap(), [], "still hung");
    assert!(begun.elapsed() >= timeout, "answered after {:?}", begun.elapsed());
    node.set_hung(1, false);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(1), HealthEventKind::Back)]);
}

#[test]
fn recovery_action_lasts_until_reset() {
    let node = Node::new(shipped::A100_4_PCIE);
    let (library, uuid) = (node.library(), node.world.gpus[2].uuid.as_str());
    let action = || library.recovery_action(&node.uuid(2)).unwrap();
    let mut watch = watch(&node, &node.uuids());
    assert_eq!(action(), Some(RecoveryAction::None));
    let drain = control::RecoveryAction::DrainAndReset;
    node.control.update(|control| control.report_xid(uuid, 48, drain)).unwrap();
    let expected = [48, 154].map(|code| event(node.uuid(2), HealthEventKind::Xid(Xid(code))));
    assert_eq!(watch.wait(LONG).unwrap(), expected);
    assert_eq!(action(), Some(RecoveryAction::DrainAndReset));
    assert_eq!(library.recovery_action(&node.uuid(1)).unwrap(), Some(RecoveryAction::None));
    node.control.update(|control| control.reset(uuid)).unwrap();
    assert_eq!(action(), Some(RecoveryAction::None));
}

#[test]
fn recovery_action_is_none_on_old_driver_and_fails_on_lost_gpu() {
    // This GPU's driver is 535; the field was added in 565.
    let node = Node::new(shipped::T4_1);
    let library = node.library();
    assert_eq!(library.recovery_action(&node.uuid(0)).unwrap(), None);
    node.lose(0);
    let lost = library.recovery_action(&node.uuid(0));
    assert!(matches!(lost, Err(LibraryError::Lost { .. })), "{lost:?}");
}

#[test]
fn only_hardware_errors_make_gpu_unhealthy() {
    let code = |kind: HealthEventKind| match kind.health() {
        Some(Health::Unhealthy { code, .. }) => Some(code),
        Some(Health::Healthy) | None => None,
    };
    assert_eq!(code(HealthEventKind::Xid(Xid(79))).as_deref(), Some("Xid79"));
    assert_eq!(code(HealthEventKind::Xid(Xid(31))), None);
    assert_eq!(code(HealthEventKind::DoubleBitEcc).as_deref(), Some("DoubleBitEcc"));
    assert_eq!(code(HealthEventKind::Lost).as_deref(), Some("Lost"));
    assert_eq!(code(HealthEventKind::Back), None);
}

#[test]
fn reads_memory_and_processes_of_the_gpu() {
    let node = Node::new(shipped::A100_4_PCIE);
    let library = node.library();
    let before = library.memory(&node.uuid(1)).unwrap();
    node.control
        .update(|control| {
            let process = ForeignProcess { pid: 4_000_000, used_mib: 2048, name: String::new() };
            control.gpu_mut(&node.world.gpus[1].uuid).processes.push(process);
        })
        .unwrap();
    let state = StateLocation::Shared(node.control.path().with_file_name("state"));
    let usage = Usage::open(&state, &node.world).unwrap();
    usage.charge(1, GIB, 80 * GIB).unwrap();
    let after = library.memory(&node.uuid(1)).unwrap();
    assert_eq!((after.used - before.used, before.free - after.free), (3 * GIB, 3 * GIB));
    let expected = [
        GpuProcess { pid: std::process::id(), bytes: Some(GIB) },
        GpuProcess { pid: 4_000_000, bytes: Some(2 * GIB) },
    ];
    assert_eq!(library.processes(&node.uuid(1)).unwrap(), expected);
    assert_eq!(library.processes(&node.uuid(0)).unwrap(), []);
}

#[test]
fn reads_utilization_of_processes_since_the_last_sample() {
    let node = Node::new(shipped::A100_4_PCIE);
    let library = node.library();
    let none = library.utilization(&node.uuid(1), 7).unwrap().expect("it is supported");
    assert_eq!(none, ProcessUtilization { last_us: 7, age: None, percent: [].into() });
    node.control
        .update(|control| {
            let process = ForeignProcess { pid: 4_000_000, used_mib: 2048, name: String::new() };
            control.gpu_mut(&node.world.gpus[1].uuid).processes.push(process);
        })
        .unwrap();
    let found = library.utilization(&node.uuid(1), 7).unwrap().expect("it is supported");
    assert_eq!(found.percent, [(4_000_000, 50)].into());
    assert!(found.last_us > 7, "the time of the sample");
    assert!(found.age.is_some_and(|age| age < Duration::from_secs(3_600)), "{:?}", found.age);
    let unknown = GpuUuid::new("GPU-00000000-0000-0000-0000-00000000dead").unwrap();
    assert!(matches!(library.utilization(&unknown, 0), Err(LibraryError::Lost { .. })));
}
