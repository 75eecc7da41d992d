//! What an XID says about the GPU.
//!
//! An XID is how NVIDIA's kernel driver reports an error
//! (<https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>). Most mean that the GPU must be reset or its node
//! looked after; some are an application's own doing, or are noted for later, and the GPU goes on serving others. Shared
//! GPUs make the difference matter: one tenant's bad pointer (31) must not take the GPU away from the rest.

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
    /// Nothing new may be put on the GPU.
    Unhealthy,
}

/// What NVIDIA's device plugin ignores as application errors too (k8s-device-plugin, `internal/rm/health.go`), and 94, for
/// which the catalogue says to restart the application: the error was contained in it.
const APPLICATION: [(u64, &str); 7] = [
    (13, "graphics engine exception"),
    (31, "GPU memory page fault"),
    (43, "GPU stopped processing"),
    (45, "preemptive cleanup, due to previous errors"),
    (68, "video processor exception"),
    (94, "contained memory error"),
    (109, "context switch timeout"),
];

/// The GPU repaired itself, and wants a reset some time ("GPU Debug Guidelines", "Xid Messages").
const NOTICE: [(u64, &str); 2] =
    [(63, "row remapping or page retirement recorded"), (92, "high single-bit ECC error rate")];

/// Words for those that operators meet most; the rest is referred to by number.
const UNHEALTHY: [(u64, &str); 12] = [
    (46, "GPU stopped processing"),
    (48, "double-bit ECC error"),
    (61, "internal micro-controller breakpoint"),
    (62, "internal micro-controller halt"),
    (64, "row remapping or page retirement failed"),
    (74, "NVLink error"),
    (79, "GPU has fallen off the bus"),
    (95, "uncontained memory error"),
    (110, "security fault"),
    (119, "GSP RPC timeout"),
    (120, "GSP error"),
    (140, "unrecovered ECC error"),
];

impl Xid {
    /// What to conclude. An XID that is not listed is taken seriously: new ones are added for new ways to fail.
    pub fn verdict(self) -> Verdict {
        let is_in = |list: &[(u64, &str)]| list.iter().any(|(code, _)| *code == self.0);
        if is_in(&APPLICATION) {
            Verdict::Application
        } else if is_in(&NOTICE) {
            Verdict::Notice
        } else {
            Verdict::Unhealthy
        }
    }

    /// Words for it.
    pub fn description(self) -> &'static str {
        let mut all = APPLICATION.iter().chain(&NOTICE).chain(&UNHEALTHY);
        all.find(|(code, _)| *code == self.0).map_or("see NVIDIA's XID catalogue", |(_, words)| words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenants_fault_does_not_take_the_gpu_from_the_rest() {
        for code in [13, 31, 43, 45, 68, 94, 109] {
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
        assert_eq!(Xid(63).verdict(), Verdict::Notice);
    }

    #[test]
    fn no_xid_is_in_two_lists() {
        let mut codes: Vec<_> =
            APPLICATION.iter().chain(&NOTICE).chain(&UNHEALTHY).map(|(code, _)| *code).collect();
        let count = codes.len();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), count);
    }
}
