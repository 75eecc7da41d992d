use tessera_api::gpu::Unpublished;
use tessera_gpu::{HealthEventKind, Xid};

use super::*;

const GPU: &str = "GPU-00000000-0000-0000-0000-000000000001";
const NONE: Option<RecoveryAction> = Some(RecoveryAction::None);
const RESET: Option<RecoveryAction> = Some(RecoveryAction::GpuReset);

fn gpu() -> GpuUuid {
    GpuUuid::new(GPU).expect("a UUID")
}

fn after(kind: HealthEventKind) -> (Verdicts, Instant) {
    let (mut verdicts, now) = (Verdicts::default(), Instant::now());
    assert!(verdicts.remember(&HealthEvent { gpu: gpu(), kind }, now));
    (verdicts, now)
}

fn code(health: Health) -> Option<String> {
    match health {
        Health::Healthy => None,
        Health::Unhealthy { code, .. } => Some(code),
    }
}

fn gone() -> Inventory {
    let reason = UnpublishedReason::Lost;
    let lost = Unpublished { uuid: Some(gpu()), index: None, pci_bus_id: None, reason };
    Inventory::new(vec![], vec![], vec![lost])
}

#[test]
fn gpu_is_healthy_after_recovery_action() {
    let (mut verdicts, now) = after(HealthEventKind::Xid(Xid(119)));
    assert_eq!(
        code(verdicts.health(&gpu(), NONE, now)).as_deref(),
        Some("Xid119"),
        "the driver is not that fast"
    );
    let Health::Unhealthy { code: named, message } = verdicts.health(&gpu(), RESET, now) else {
        panic!("healthy")
    };
    assert_eq!(named, "Xid119");
    assert!(
        message.contains("GSP RPC timeout") && message.contains("a reset of the GPU"),
        "{message}"
    );
    assert_eq!(verdicts.health(&gpu(), NONE, now), Health::Healthy);
    assert_eq!(verdicts.health(&gpu(), NONE, now), Health::Healthy, "the verdict is removed");
}

#[test]
fn error_without_recovery_action_ends_after_30_seconds() {
    let (mut verdicts, now) = after(HealthEventKind::Xid(Xid(48)));
    let almost = now + SETTLES_WITHIN - Duration::from_millis(1);
    assert_eq!(code(verdicts.health(&gpu(), NONE, almost)).as_deref(), Some("Xid48"));
    assert_eq!(verdicts.health(&gpu(), NONE, now + SETTLES_WITHIN), Health::Healthy);
}

#[test]
fn error_that_sets_no_action_stays_until_reset() {
    let (mut verdicts, now) = after(HealthEventKind::Xid(Xid(119)));
    let much_later = now + Duration::from_secs(3600);
    assert_eq!(code(verdicts.health(&gpu(), NONE, much_later)).as_deref(), Some("Xid119"));
    verdicts.record_absent(&gone());
    assert_eq!(verdicts.health(&gpu(), NONE, much_later), Health::Healthy);
}

#[test]
fn without_recovery_actions_only_a_reset_ends_verdict() {
    let (mut verdicts, now) = after(HealthEventKind::DoubleBitEcc);
    let much_later = now + Duration::from_secs(3600);
    assert_eq!(code(verdicts.health(&gpu(), None, much_later)).as_deref(), Some("DoubleBitEcc"));
    verdicts.record_absent(&gone());
    assert_eq!(verdicts.health(&gpu(), None, much_later), Health::Healthy);
}

#[test]
fn excluded_gpu_was_not_reset() {
    let (mut verdicts, now) = after(HealthEventKind::DoubleBitEcc);
    let reason = UnpublishedReason::Excluded;
    let excluded = Unpublished { uuid: Some(gpu()), index: None, pci_bus_id: None, reason };
    verdicts.record_absent(&Inventory::new(vec![], vec![], vec![excluded]));
    assert_eq!(code(verdicts.health(&gpu(), None, now)).as_deref(), Some("DoubleBitEcc"));
}

#[test]
fn recovery_action_counts_without_event() {
    let mut verdicts = Verdicts::default();
    assert_eq!(code(verdicts.health(&gpu(), RESET, Instant::now())).as_deref(), Some("GpuReset"));
    assert_eq!(verdicts.health(&gpu(), NONE, Instant::now()), Health::Healthy);
    assert_eq!(verdicts.health(&gpu(), None, Instant::now()), Health::Healthy);
}

#[test]
fn another_error_restarts_the_wait() {
    let (mut verdicts, now) = after(HealthEventKind::Xid(Xid(119)));
    verdicts.health(&gpu(), RESET, now);
    assert!(
        verdicts.remember(&HealthEvent { gpu: gpu(), kind: HealthEventKind::Xid(Xid(46)) }, now)
    );
    assert_eq!(code(verdicts.health(&gpu(), NONE, now)).as_deref(), Some("Xid46"));
}

#[test]
fn later_transient_error_does_not_clear_lasting_one() {
    let (mut verdicts, now) = after(HealthEventKind::Xid(Xid(119)));
    assert!(Xid(120).sets_recovery_action(), "alone it ends after 30 s");
    verdicts.remember(&HealthEvent { gpu: gpu(), kind: HealthEventKind::Xid(Xid(120)) }, now);
    let much_later = now + Duration::from_secs(3600);
    assert_eq!(code(verdicts.health(&gpu(), NONE, much_later)).as_deref(), Some("Xid120"));
    verdicts.record_absent(&gone());
    assert_eq!(verdicts.health(&gpu(), NONE, much_later), Health::Healthy);
}
