//! What an XID says about the GPU.
//!
//! An XID is how NVIDIA's kernel driver reports an error
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>). Most mean that the GPU must be reset or its node
//! looked after; some are an application's own doing, or are noted for later, and the GPU goes on
//! serving others. Shared GPUs make the difference matter: one tenant's bad pointer (31) must not
//! take the GPU away from the rest.

use std::ops::RangeInclusive;

/// An XID's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u64);

/// What to conclude from an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The application that caused it dies; the GPU is fine.
    Application,
    /// The GPU works on; somebody should look at it at a convenient time.
    Notice,
    /// Says nothing by itself: the driver's [recovery action](crate::RecoveryAction) has changed.
    RecoveryAction,
    /// Nothing new may be put on the GPU.
    Unhealthy,
}

/// XIDs with the words for them.
type Words = [(RangeInclusive<u64>, &'static str)];

/// For these the catalogue says to restart the application, or NVIDIA's device plugin takes them
/// for application errors (k8s-device-plugin, `internal/rm/health.go`: 13, 31, 43, 45, 68, 109). 94
/// was contained in the application. Where 109 or 45 is more than that, the recovery action says
/// so.
const APPLICATION: &Words = &[
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

/// The catalogue says to ignore these, or to look at them at a convenient time. After 63 the GPU
/// has repaired itself and wants a reset some time.
const NOTICE: &Words = &[
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

/// Words for those that operators meet most; the rest is referred to by number.
const UNHEALTHY: &Words = &[
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

/// The XID that announces another recovery action.
const RECOVERY_ACTION_CHANGED: u64 = 154;

/// After these, drivers since 565 set the recovery action if one is needed (catalogue, column "Xid
/// 154 linkage"). After others it may stay "none" although the GPU is broken.
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
    /// What to conclude. An XID that is not listed is taken seriously: new ones are added for new
    /// ways to fail.
    pub fn verdict(self) -> Verdict {
        if self.0 == RECOVERY_ACTION_CHANGED {
            Verdict::RecoveryAction
        } else if self.words_in(APPLICATION).is_some() {
            Verdict::Application
        } else if self.words_in(NOTICE).is_some() {
            Verdict::Notice
        } else {
            Verdict::Unhealthy
        }
    }

    /// Whether a recovery action of "none" after it means that none is needed.
    pub fn sets_recovery_action(self) -> bool {
        SETS_RECOVERY_ACTION.iter().any(|codes| codes.contains(&self.0))
    }

    /// Words for it.
    pub fn description(self) -> &'static str {
        let lists = [APPLICATION, NOTICE, UNHEALTHY];
        lists.iter().find_map(|list| self.words_in(list)).unwrap_or("see NVIDIA's XID catalogue")
    }

    fn words_in(self, list: &Words) -> Option<&'static str> {
        list.iter().find(|(codes, _)| codes.contains(&self.0)).map(|(_, words)| *words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenants_fault_does_not_take_the_gpu_from_the_rest() {
        for code in [8, 13, 31, 43, 45, 68, 69, 94, 101, 109] {
            assert_eq!(Xid(code).verdict(), Verdict::Application, "{code}");
        }
    }

    #[test]
    fn what_breaks_the_gpu_and_what_nobody_knows_is_unhealthy() {
        for code in [48, 64, 74, 79, 95, 119, 120, 140, 9999] {
            assert_eq!(Xid(code).verdict(), Verdict::Unhealthy, "{code}");
        }
        assert_eq!(Xid(79).description(), "GPU has fallen off the bus");
        assert_eq!(Xid(9999).description(), "see NVIDIA's XID catalogue");
    }

    #[test]
    fn a_repaired_gpu_is_noticed_and_not_condemned() {
        for code in [37, 63, 92, 121] {
            assert_eq!(Xid(code).verdict(), Verdict::Notice, "{code}");
        }
    }

    #[test]
    fn the_xid_of_a_changed_recovery_action_says_nothing_by_itself() {
        assert_eq!(Xid(154).verdict(), Verdict::RecoveryAction);
        assert!(Xid(48).sets_recovery_action() && Xid(145).sets_recovery_action());
        assert!(!Xid(119).sets_recovery_action() && !Xid(9999).sets_recovery_action());
    }

    #[test]
    fn no_xid_is_in_two_lists() {
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
