//! What happens to GPUs at run time, as the driver is told of it.

mod node;

use std::time::{Duration, Instant};

use tessera_api::gpu::Health;
use tessera_api::names::GpuUuid;
use tessera_fake_world::control::{self, EventKind, ForeignProcess};
use tessera_fake_world::{StatePlace, Usage, shipped};
use tessera_gpu::{
    GpuLibrary as _, GpuProcess, HealthEvent, HealthEventKind, HealthWatch, LibraryError,
    RecoveryAction, Xid,
};

use node::Node;

/// Longer than any test takes: who waits that long for an event does not get one.
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
    fn happens(&self, index: usize, kind: EventKind) {
        let uuid = &self.world.gpus[index].uuid;
        self.control
            .update(|control| control.push_event(uuid, kind))
            .expect("the control file is written");
    }

    fn hangs(&self, index: usize, hung: bool) {
        let uuid = &self.world.gpus[index].uuid;
        self.control
            .update(|control| control.gpu_mut(uuid).hung = hung)
            .expect("the control file is written");
    }
}

#[test]
fn xids_and_ecc_errors_are_reported_once_with_their_gpu() {
    let node = Node::new(shipped::H100_8_NVSWITCH);
    let mut watch = watch(&node, &node.uuids());
    assert_eq!(watch.wait(NOW).unwrap(), []);
    node.happens(2, EventKind::Xid(31));
    node.happens(4, EventKind::EccDoubleBit);
    let expected = [
        event(node.uuid(2), HealthEventKind::Xid(Xid(31))),
        event(node.uuid(4), HealthEventKind::DoubleBitEcc),
    ];
    assert_eq!(watch.wait(LONG).unwrap(), expected);
    assert_eq!(watch.wait(NOW).unwrap(), []);
}

#[test]
fn events_before_the_watch_and_of_other_gpus_are_not_reported() {
    let node = Node::new(shipped::A100_4_PCIE);
    node.happens(0, EventKind::Xid(48));
    let mut watch = watch(&node, &[node.uuid(0)]);
    node.happens(1, EventKind::Xid(48));
    assert_eq!(watch.wait(NOW).unwrap(), []);
}

#[test]
fn a_silent_loss_is_found_and_the_other_gpus_stay_watched() {
    let node = Node::new(shipped::A100_4_PCIE);
    let mut watch = watch(&node, &node.uuids());
    node.lose(3);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(3), HealthEventKind::Lost)]);
    assert_eq!(watch.wait(NOW).unwrap(), [], "reported once");
    node.happens(0, EventKind::Xid(79));
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(0), HealthEventKind::Xid(Xid(79)))]);
    node.heal(3);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(3), HealthEventKind::Back)]);
    node.happens(3, EventKind::Xid(63));
    assert_eq!(
        watch.wait(LONG).unwrap(),
        [event(node.uuid(3), HealthEventKind::Xid(Xid(63)))],
        "watched again"
    );
}

#[test]
fn the_xid_of_a_loss_is_not_lost_with_the_gpu() {
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
    // With no GPU left, waiting ends with the time-out and nothing else.
    assert_eq!(watch.wait(Duration::from_millis(1)).unwrap(), []);
}

#[test]
fn a_gpu_that_is_lost_before_the_watch_is_reported_at_once() {
    let node = Node::new(shipped::A100_4_PCIE);
    node.lose(2);
    let mut watch = watch(&node, &node.uuids());
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(2), HealthEventKind::Lost)]);
}

#[test]
fn a_gpu_that_hangs_is_lost_and_does_not_make_the_watch_run_hot() {
    let node = Node::new(shipped::A100_4_PCIE);
    let mut watch = watch(&node, &node.uuids());
    node.hangs(1, true);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(1), HealthEventKind::Lost)]);
    let (begun, a_while) = (Instant::now(), Duration::from_millis(200));
    assert_eq!(watch.wait(a_while).unwrap(), [], "it still hangs, and is not back");
    assert!(begun.elapsed() >= a_while, "answered after {:?}", begun.elapsed());
    node.hangs(1, false);
    assert_eq!(watch.wait(LONG).unwrap(), [event(node.uuid(1), HealthEventKind::Back)]);
}

#[test]
fn the_recovery_action_is_what_the_driver_says_until_the_gpu_is_reset() {
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
fn a_driver_that_knows_no_recovery_action_is_no_error_and_a_lost_gpu_is() {
    // Its driver is 535; the field came with 565.
    let node = Node::new(shipped::T4_1);
    let library = node.library();
    assert_eq!(library.recovery_action(&node.uuid(0)).unwrap(), None);
    node.lose(0);
    let lost = library.recovery_action(&node.uuid(0));
    assert!(matches!(lost, Err(LibraryError::Lost { .. })), "{lost:?}");
}

#[test]
fn only_what_breaks_the_gpu_makes_it_unhealthy() {
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
fn memory_and_processes_are_those_of_the_gpu() {
    let node = Node::new(shipped::A100_4_PCIE);
    let library = node.library();
    let before = library.memory(&node.uuid(1)).unwrap();
    node.control
        .update(|control| {
            let process = ForeignProcess { pid: 4_000_000, used_mib: 2048, name: String::new() };
            control.gpu_mut(&node.world.gpus[1].uuid).processes.push(process);
        })
        .unwrap();
    let state = StatePlace::Shared(node.control.path().with_file_name("state"));
    let usage = Usage::open(&state, &node.world).unwrap();
    usage.take(1, GIB, 80 * GIB).unwrap();
    let after = library.memory(&node.uuid(1)).unwrap();
    assert_eq!((after.used - before.used, before.free - after.free), (3 * GIB, 3 * GIB));
    let expected = [
        GpuProcess { pid: std::process::id(), bytes: Some(GIB) },
        GpuProcess { pid: 4_000_000, bytes: Some(2 * GIB) },
    ];
    assert_eq!(library.processes(&node.uuid(1)).unwrap(), expected);
    assert_eq!(library.processes(&node.uuid(0)).unwrap(), []);
}
