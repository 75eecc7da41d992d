//! One piece of work per claim at a time.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tessera_api::names::ClaimUid;
use tokio::sync::OwnedMutexGuard;

/// A lock for each claim that anybody works on.
#[derive(Debug, Default)]
pub struct ClaimLocks {
    locks: Mutex<HashMap<ClaimUid, Arc<tokio::sync::Mutex<()>>>>,
}

/// A claim, locked.
#[derive(Debug)]
pub struct ClaimGuard {
    locks: Arc<ClaimLocks>,
    claim: ClaimUid,
    guard: Option<OwnedMutexGuard<()>>,
}

impl ClaimLocks {
    /// Waits for the claim, in the order of asking.
    pub async fn lock(self: Arc<Self>, claim: ClaimUid) -> ClaimGuard {
        let lock = {
            let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(locks.entry(claim.clone()).or_default())
        };
        let guard = lock.lock_owned().await;
        ClaimGuard { locks: self, claim, guard: Some(guard) }
    }
}

impl Drop for ClaimGuard {
    fn drop(&mut self) {
        self.guard = None;
        let mut locks = self.locks.locks.lock().unwrap_or_else(PoisonError::into_inner);
        // Only the map has it: nobody holds it and nobody waits.
        if locks.get(&self.claim).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.claim);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> ClaimUid {
        ClaimUid::new(text).expect("a UID")
    }

    #[tokio::test]
    async fn a_claim_is_given_to_one_at_a_time_and_forgotten_afterwards() {
        let locks = Arc::new(ClaimLocks::default());
        let first = Arc::clone(&locks).lock(uid("a")).await;
        let _other_claim = Arc::clone(&locks).lock(uid("b")).await;

        let mut second = Box::pin(Arc::clone(&locks).lock(uid("a")));
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        let second = second.await;
        assert_eq!(locks.locks.lock().expect("no panic").len(), 2);
        drop(second);
        assert_eq!(locks.locks.lock().expect("no panic").len(), 1);
    }
}
