//! Effect of an XID on the GPU's health.
//!
//! An XID is an error code of NVIDIA's kernel driver
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>). Most mean that the GPU must
//! be reset or its node needs service. Others are caused by an application, or are only
//! informational, and the GPU continues to serve other processes. The difference matters for shared
//! GPUs: an invalid pointer of one tenant (31) must not make the GPU unusable for the others.

use std::ops::RangeInclusive;

/// Number of an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u64);

/// Effect of an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthImpact {
    /// The application that caused the XID is terminated; the GPU is healthy.
    Application,
    /// The GPU continues to work and should be inspected at a convenient time.
    Notice,
    /// The driver's [recovery action](crate::RecoveryAction) has changed; it decides the health.
    RecoveryAction,
    /// The GPU must get no new claims.
    Unhealthy,
}

/// Descriptions of XIDs.
type Descriptions = [(RangeInclusive<u64>, &'static str)];

/// XIDs of application errors. The catalogue recommends a restart of the application, or NVIDIA's
/// device plugin treats them as application errors (k8s-device-plugin, `internal/rm/health.go`: 13,
/// 31, 43, 45, 68, 109). 94 was contained in the application. If 109 or 45 is more severe, the
/// recovery action reports it.
const APPLICATION: &Descriptions = &[
    (8..=8, "GPU stopped processing a channel"),
    (11..=11, "invalid or corrupted push buffer stream"),
    (13..=13, "graphics engine exception"),
    (25..=25, "invalid or illegal push buffer command"),
    (31..=31, "GPU memory page fault"),
    (32..=32, "invalid or corrupted push buffer stream"),
    (39..=41, "copy engine exception"),
    (43..=43, "GPU stopped processing"),
    (45..=45, "preemptive cleanup, due to previous errors"),
    (60..=60, "SEC2 engine exception"),
    (68..=68, "video processor exception"),
    (69..=69, "graphics engine class error"),
    (70..=72, "copy engine exception"),
    (75..=77, "copy engine exception"),
    (80..=80, "corrupted data sent to the GPU"),
    (82..=82, "JPEG engine exception"),
    (83..=84, "video decoder exception"),
    (85..=85, "copy engine exception"),
    (86..=86, "optical flow engine exception"),
    (88..=89, "video decoder exception"),
    (94..=94, "contained memory error"),
    (96..=98, "video decoder exception"),
    (99..=105, "JPEG engine exception"),
    (109..=109, "context switch timeout"),
    (126..=135, "copy engine exception"),
    (139..=139, "optical flow engine exception"),
];

/// XIDs that the catalogue recommends to ignore, or to inspect at a convenient time. After 63 the
/// GPU has repaired itself and should be reset later.
const NOTICE: &Descriptions = &[
    (14..=14, "test of the error path"),
    (37..=37, "unknown method"),
    (38..=38, "watchdog of the front end"),
    (44..=44, "graphics engine fault during context switch"),
    (63..=63, "row remapping or page retirement recorded"),
    (66..=67, "register access violation"),
    (92..=92, "high single-bit ECC error rate"),
    (93..=93, "InfoROM wear"),
    (106..=107, "test message"),
    (108..=108, "NVLink translation error at the other end"),
    (121..=121, "C2C link error"),
    (137..=137, "NVLink privilege error"),
    (141..=141, "fast path error"),
    (157..=157, "resource retirement failed"),
    (160..=161, "channel retirement"),
];

/// Descriptions of frequent XIDs that make a GPU unhealthy; others are shown by number.
const UNHEALTHY: &Descriptions = &[
    (46..=46, "GPU stopped processing"),
    (48..=48, "double-bit ECC error"),
    (61..=61, "internal micro-controller breakpoint"),
    (62..=62, "internal micro-controller halt"),
    (64..=64, "row remapping or page retirement failed"),
    (74..=74, "NVLink error"),
    (79..=79, "GPU has fallen off the bus"),
    (95..=95, "uncontained memory error"),
    (110..=110, "security fault"),
    (119..=119, "GSP RPC timeout"),
    (120..=120, "GSP error"),
    (140..=140, "unrecovered ECC error"),
    (143..=143, "GPU initialisation error"),
    (158..=158, "fatal timeout"),
];

/// XID that reports a changed recovery action.
const RECOVERY_ACTION_CHANGED: u64 = 154;

/// XIDs after which drivers since 565 set the recovery action if needed. From the catalogue,
/// column "Xid 154 linkage". After other XIDs it may stay "none" although the GPU is broken.
const SETS_RECOVERY_ACTION: &[RangeInclusive<u64>] = &[
    48..=48,
    62..=64,
    74..=74,
    79..=79,
    94..=95,
    110..=110,
    120..=120,
    136..=136,
    144..=150,
    155..=156,
];

impl Xid {
    /// Returns the effect on the GPU's health. An unlisted XID is unhealthy, because new ones are
    /// added for new failures.
    pub fn health_impact(self) -> HealthImpact {
        if self.0 == RECOVERY_ACTION_CHANGED {
            HealthImpact::RecoveryAction
        } else if self.description_in(APPLICATION).is_some() {
            HealthImpact::Application
        } else if self.description_in(NOTICE).is_some() {
            HealthImpact::Notice
        } else {
            HealthImpact::Unhealthy
        }
    }

    /// Returns true if a recovery action of "none" after this XID means that no action is needed.
    pub fn sets_recovery_action(self) -> bool {
        SETS_RECOVERY_ACTION.iter().any(|codes| codes.contains(&self.0))
    }

    /// Returns a short description.
    pub fn description(self) -> &'static str {
        let lists = [APPLICATION, NOTICE, UNHEALTHY];
        lists
            .iter()
            .find_map(|list| self.description_in(list))
            .unwrap_or("see NVIDIA's XID catalogue")
    }

    fn description_in(self, list: &Descriptions) -> Option<&'static str> {
        list.iter().find(|(codes, _)| codes.contains(&self.0)).map(|(_, description)| *description)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn application_errors_keep_gpu_healthy() {
        for code in [8, 13, 31, 43, 45, 68, 69, 94, 101, 109] {
            assert_eq!(Xid(code).health_impact(), HealthImpact::Application, "{code}");
        }
    }

    #[test]
    fn hardware_errors_and_unknown_xids_are_unhealthy() {
        for code in [48, 64, 74, 79, 95, 119, 120, 140, 9999] {
            assert_eq!(Xid(code).health_impact(), HealthImpact::Unhealthy, "{code}");
        }
        assert_eq!(Xid(79).description(), "GPU has fallen off the bus");
        assert_eq!(Xid(9999).description(), "see NVIDIA's XID catalogue");
    }

    #[test]
    fn repaired_gpu_is_noticed_and_stays_healthy() {
        for code in [37, 63, 92, 121] {
            assert_eq!(Xid(code).health_impact(), HealthImpact::Notice, "{code}");
        }
    }

    #[test]
    fn xid_154_refers_to_recovery_action() {
        assert_eq!(Xid(154).health_impact(), HealthImpact::RecoveryAction);
        assert!(Xid(48).sets_recovery_action() && Xid(145).sets_recovery_action());
        assert!(!Xid(119).sets_recovery_action() && !Xid(9999).sets_recovery_action());
    }

    #[test]
    fn each_xid_is_in_one_list() {
        let lists = [APPLICATION, NOTICE, UNHEALTHY];
        let mut codes: Vec<_> = lists
            .into_iter()
            .flatten()
            .flat_map(|(codes, _)| codes.clone())
            .chain([RECOVERY_ACTION_CHANGED])
            .collect();
        let count = codes.len();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), count);
    }
}
