//! Leader election: client-go's algorithm on a Lease, and the end of the process when leadership is
//! lost.
//!
//! [`decide`] is pure. A lease expires when *we* have seen it unchanged for its duration; the
//! holder's clock is not used. Every write is a replace with the `resourceVersion` that was read,
//! so of two candidates that see the same expired lease one succeeds.
//!
//! The API server checks no fencing token on writes of claims. Instead, requests end before another
//! process can lead ([`REQUEST_TIMEOUT`] is shorter than the time between the renew deadline and
//! the end of the lease), the holder ends its process when it cannot renew, and a process that
//! takes over from a holder that did not release waits for that time before it lists and writes.

#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, ResourceExt};
use tessera_api::names::CONTROLLER_LEASE;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::commit::REQUEST_TIMEOUT;

/// client-go's defaults.
const LEASE_DURATION: Duration = Duration::from_secs(15);
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// The interval of renewals by a candidate that waits until it may lead.
const RENEW_PERIOD_BEFORE_LEADING: Duration = Duration::from_secs(5);

const _: () =
    assert!(REQUEST_TIMEOUT.as_millis() < LEASE_DURATION.as_millis() - RENEW_DEADLINE.as_millis());

/// The end of leadership.
#[derive(Debug, thiserror::Error)]
pub enum LeadershipError {
    /// Another process holds the lease.
    #[error("the Lease is now held by `{holder}`; stopping, so that there is one writer")]
    Taken {
        /// The holder.
        holder: String,
    },
    /// It could not be renewed in time.
    #[error(
        "cannot renew the Lease within {RENEW_DEADLINE:?}; stopping, so that there is one writer"
    )]
    NotRenewed,
}

/// The next action on a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseDecision {
    /// It does not exist: create it.
    Create,
    /// It is ours: renew it.
    Renew,
    /// Its holder has released it: acquire it.
    Acquire,
    /// It exists and has never been held: acquire it, and wait as after [`Create`](Self::Create).
    /// It may have replaced one that is held.
    TakeFirst,
    /// Its holder is gone: acquire it, and wait before writing anything.
    TakeOver,
    /// Another process holds it.
    Wait,
}

/// Returns the action on `lease`, which we have seen unchanged since `unchanged_since`.
pub fn decide(
    lease: Option<&LeaseSpec>,
    identity: &str,
    unchanged_since: Instant,
    now: Instant,
) -> LeaseDecision {
    let Some(lease) = lease else { return LeaseDecision::Create };
    match lease.holder_identity.as_deref() {
        None | Some("") if lease.renew_time.is_none() => LeaseDecision::TakeFirst,
        None | Some("") => LeaseDecision::Acquire,
        Some(holder) if holder == identity => LeaseDecision::Renew,
        Some(_) => {
            let duration = lease.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
            let duration = duration.map_or(LEASE_DURATION, Duration::from_secs);
            if now.duration_since(unchanged_since) >= duration {
                LeaseDecision::TakeOver
            } else {
                LeaseDecision::Wait
            }
        }
    }
}

/// Returns the time that a candidate that has just written the lease waits before it leads.
///
/// | decision | processes that may still write | for how long |
/// |---|---|---|
/// | `Acquire` | none: the lease was released after the last write | |
/// | `TakeOver` | the previous holder: requests sent before its renew deadline | [`REQUEST_TIMEOUT`] |
/// | `Renew` | a previous process of the same name: likewise | [`REQUEST_TIMEOUT`] |
/// | `Create`, `TakeFirst` | a holder that has not seen its lease deleted or replaced | until its renew deadline, and then likewise |
pub fn wait_before_leading(decision: LeaseDecision) -> Duration {
    match decision {
        LeaseDecision::Acquire | LeaseDecision::Wait => Duration::ZERO,
        LeaseDecision::TakeOver | LeaseDecision::Renew => REQUEST_TIMEOUT,
        LeaseDecision::Create | LeaseDecision::TakeFirst => RENEW_DEADLINE + REQUEST_TIMEOUT,
    }
}

/// The time during which writes may be sent. It ends by itself, also while the task that renews the
/// lease does not run: a process that was suspended resumes without it.
#[derive(Debug, Clone)]
pub struct Tenure(Option<watch::Receiver<Instant>>);

impl Tenure {
    /// Returns a tenure without end, for a process that is the only one.
    pub fn endless() -> Self {
        Self(None)
    }

    /// Returns true if nothing may be sent any more. A request sent before ends before another
    /// process can lead.
    pub fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(|renewed| renewed.borrow().elapsed() >= RENEW_DEADLINE)
    }
}

/// The failure of an attempt to read and write the lease.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    /// The request timed out, so that a dead connection costs an attempt and not the lease.
    #[error("no answer within {REQUEST_TIMEOUT:?}")]
    Late,
    /// The API server refused the request or cannot be reached.
    #[error(transparent)]
    Request(kube::Error),
}

async fn answered<T>(
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, AttemptError> {
    let answer =
        tokio::time::timeout(REQUEST_TIMEOUT, request).await.map_err(|_| AttemptError::Late)?;
    answer.map_err(AttemptError::Request)
}

/// A candidate for leadership.
pub struct Candidate {
    leases: Api<Lease>,
    identity: String,
    /// The lease as last read, and the time of its last change.
    seen: Option<(Lease, Instant)>,
    /// The time just before the last successful write of the lease was sent. Other candidates
    /// count from its arrival, which is later than this and may be much earlier than its
    /// answer.
    renewed: watch::Sender<Instant>,
}

impl Candidate {
    /// Returns a candidate named `identity` for the lease in `namespace`.
    pub fn new(client: Client, namespace: &str, identity: String) -> Self {
        let renewed = watch::Sender::new(Instant::now());
        Self { leases: Api::namespaced(client, namespace), identity, seen: None, renewed }
    }

    /// Returns the tenure of this candidate once it leads.
    pub fn tenure(&self) -> Tenure {
        Tenure(Some(self.renewed.subscribe()))
    }

    /// Waits until this process leads. Afterwards it is safe to list and write.
    pub async fn acquire(&mut self) {
        loop {
            if let Some(decision) = self.attempt_in(REQUEST_TIMEOUT).await.unwrap_or_default() {
                let wait = wait_before_leading(decision);
                if !wait.is_zero() {
                    tracing::info!(
                        ?decision,
                        ?wait,
                        "waiting until no write of a previous leader can be under way"
                    );
                }
                if self.keep_for(wait).await {
                    tracing::info!(identity = self.identity, ?decision, "leading");
                    return;
                }
            }
            tokio::time::sleep(RETRY_PERIOD).await;
        }
    }

    /// Keeps the lease for this time. Returns true if it is still ours then, renewed at the end:
    /// work begins with a fresh lease.
    async fn keep_for(&mut self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return wait.is_zero()
                    || matches!(self.attempt_in(REQUEST_TIMEOUT).await, Some(Some(_)));
            }
            tokio::time::sleep(left.min(RENEW_PERIOD_BEFORE_LEADING)).await;
            if left > RENEW_PERIOD_BEFORE_LEADING
                && matches!(self.attempt_in(REQUEST_TIMEOUT).await, Some(None))
            {
                return false;
            }
        }
    }

    /// Makes an [`attempt`](Self::attempt) of at most `limit`. Returns none if it failed.
    async fn attempt_in(&mut self, limit: Duration) -> Option<Option<LeaseDecision>> {
        match tokio::time::timeout(limit, self.attempt()).await {
            Ok(Ok(decision)) => return Some(decision),
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot read or write the Lease, retrying");
            }
            Err(_) => {
                tracing::warn!("cannot read and write the Lease in time, retrying")
            }
        }
        None
    }

    /// Renews until `stop`, then releases the lease.
    ///
    /// # Errors
    /// Leadership is lost: the process has to end at once.
    pub async fn hold(&mut self, stop: CancellationToken) -> Result<(), LeadershipError> {
        loop {
            let left = RENEW_DEADLINE.saturating_sub(self.renewed.borrow().elapsed());
            tokio::select! {
                () = stop.cancelled() => {
                    self.release().await;
                    return Ok(());
                }
                () = tokio::time::sleep(RETRY_PERIOD.min(left)) => {}
            }
            let left = RENEW_DEADLINE.saturating_sub(self.renewed.borrow().elapsed());
            if let Some(None) = self.attempt_in(left).await {
                return Err(LeadershipError::Taken { holder: self.holder() });
            }
            if self.renewed.borrow().elapsed() >= RENEW_DEADLINE {
                return Err(LeadershipError::NotRenewed);
            }
        }
    }

    fn holder(&self) -> String {
        let spec = self.seen.as_ref().and_then(|(lease, _)| lease.spec.as_ref());
        spec.and_then(|s| s.holder_identity.clone()).unwrap_or_default()
    }

    /// Reads the lease and writes it unless another process holds it. Returns the decision if we
    /// lead now.
    async fn attempt(&mut self) -> Result<Option<LeaseDecision>, AttemptError> {
        let lease = answered(self.leases.get_opt(CONTROLLER_LEASE)).await?;
        let now = Instant::now();
        let unchanged_since = self.observe(lease.as_ref(), now);
        // A lease without a spec exists and has never been held.
        let spec = lease.as_ref().map(|l| l.spec.clone().unwrap_or_default());
        let decision = decide(spec.as_ref(), &self.identity, unchanged_since, now);
        let written = match (decision, lease) {
            (LeaseDecision::Wait, _) => return Ok(None),
            (_, None) => answered(self.leases.create(&PostParams::default(), &self.fresh())).await,
            (_, Some(lease)) => {
                let lease = self.renewed(lease, decision);
                answered(self.leases.replace(CONTROLLER_LEASE, &PostParams::default(), &lease))
                    .await
            }
        };
        match written {
            Ok(lease) => {
                self.seen = Some((lease, now));
                self.renewed.send_replace(now);
                Ok(Some(decision))
            }
            // Another process was faster. If we lead, the next read shows which.
            Err(AttemptError::Request(kube::Error::Api(status)))
                if status.code == 409 && decision != LeaseDecision::Renew =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the time of the last change of the lease that we have seen.
    fn observe(&mut self, lease: Option<&Lease>, now: Instant) -> Instant {
        let same = |(seen, _): &(Lease, Instant)| {
            lease.is_some_and(|l| l.resource_version() == seen.resource_version())
        };
        match (&self.seen, lease) {
            (Some(seen), _) if same(seen) => seen.1,
            (_, Some(lease)) => {
                self.seen = Some((lease.clone(), now));
                now
            }
            (_, None) => now,
        }
    }

    fn fresh(&self) -> Lease {
        let metadata = ObjectMeta { name: Some(CONTROLLER_LEASE.to_owned()), ..Default::default() };
        self.renewed(Lease { metadata, spec: None }, LeaseDecision::Create)
    }

    fn renewed(&self, mut lease: Lease, decision: LeaseDecision) -> Lease {
        let now = MicroTime(Timestamp::now());
        let old = lease.spec.take().unwrap_or_default();
        let ours = decision == LeaseDecision::Renew;
        let transitions = old.lease_transitions.unwrap_or(0)
            + i32::from(matches!(decision, LeaseDecision::Acquire | LeaseDecision::TakeOver));
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
            acquire_time: if ours { old.acquire_time } else { Some(now.clone()) },
            renew_time: Some(now),
            lease_transitions: Some(transitions),
            ..Default::default()
        });
        lease
    }

    /// Releases the lease, so that the next process leads without waiting. Called when none of our
    /// writes is under way any more.
    async fn release(&self) {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.clear()).await {
            Ok(Ok(())) => tracing::info!("released the Lease"),
            Ok(Err(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "cannot release the Lease")
            }
            Err(_) => tracing::warn!("cannot release the Lease in time"),
        }
    }

    /// Clears the holder of the lease as it is now, since a renewal without an answer may have been
    /// served. Leaves a lease that another process holds.
    async fn clear(&self) -> Result<(), kube::Error> {
        let Some(mut lease) = self.leases.get_opt(CONTROLLER_LEASE).await? else { return Ok(()) };
        let Some(spec) = lease
            .spec
            .as_mut()
            .filter(|spec| spec.holder_identity.as_ref() == Some(&self.identity))
        else {
            return Ok(());
        };
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        self.leases.replace(CONTROLLER_LEASE, &PostParams::default(), &lease).await.map(drop)
    }
}
