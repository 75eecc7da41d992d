//! Arbitration of a GPU's time between shares, as the driver does it.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use tessera_intercept_limiter::compute::{Arbiter, Entitlement, Gain, Observation, Rate, Tenant};

use super::NodeShare;

/// Arbitrates between two shares until `stop` is closed.
pub(crate) fn arbitrate(shares: &[NodeShare; 2], stop: &Receiver<()>) {
    let mut arbiter = Arbiter::<2>::default();
    let mut waits = [0; 2];
    while stop.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
        let now = monotonic_ns();
        let seen = [0, 1].map(|at| {
            let grant = shares[at].grant;
            let tenant = Tenant {
                entitlement: Entitlement::of_grant(grant.policy, grant.cores_percent),
                limit: Rate::FULL,
                priority: 0,
            };
            Some(shares[at].ledger(|ledger| {
                let still = || {
                    ledger
                        .processes()
                        .any(|process| process.waits && shares[at].is_alive(process.slot))
                };
                let waited = ledger.waits() != waits[at] || still();
                waits[at] = ledger.waits();
                Observation {
                    tenant,
                    busy_ns: ledger.busy_ns(now),
                    gpu_ns: ledger.gpu_ns(),
                    gain: Gain::ONE,
                    waited,
                }
            }))
        });
        for (share, published) in shares.iter().zip(arbiter.step(now, &seen)) {
            share.publish(&published.expect("seen"));
        }
    }
}

/// Returns the time of the clock that ledgers use.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
