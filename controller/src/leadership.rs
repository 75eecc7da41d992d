//! Leader election: client-go's algorithm on a Lease, and the end of the process when leadership is
//! lost.
//!
//! [`decide`] is pure. Expiry goes by how long *we* have seen the lease unchanged, never by the
//! holder's clock. Every write is a replace with the `resourceVersion` that was read, so of two
//! candidates that see the same expired lease one wins.
//!
//! There is no fencing token that the API server would check on writes to claims. What stands in
//! for it: requests end before the lease can pass to somebody else ([`REQUEST_TIMEOUT`] is shorter
//! than what lies between the renew deadline and the lease's end), the holder ends its process when
//! it could not renew, and who takes over from a holder that did not release waits for that long
//! before it lists and writes.

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

/// How often the lease is renewed by a candidate that waits until it may lead.
const RENEW_PERIOD_BEFORE_LEADING: Duration = Duration::from_secs(5);

const _: () =
    assert!(REQUEST_TIMEOUT.as_millis() < LEASE_DURATION.as_millis() - RENEW_DEADLINE.as_millis());

/// Why leadership ended.
#[derive(Debug, thiserror::Error)]
pub enum LeadershipError {
    /// Another process holds the lease.
    #[error(
        "the Lease is held by `{holder}` now; this process stops, so that there is only one writer"
    )]
    Taken {
        /// The holder.
        holder: String,
    },
    /// It could not be renewed in time.
    #[error(
        "the Lease could not be renewed within {RENEW_DEADLINE:?}; this process stops, so that there is only one writer"
    )]
    NotRenewed,
}

/// What to do about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// There is none: make it.
    Create,
    /// It is ours: renew it.
    Renew,
    /// Its holder has given it back: take it.
    Acquire,
    /// It was made, and nobody has held it: take it, and wait as after [`Create`](Self::Create). It
    /// may have taken the place of one that is held.
    TakeFirst,
    /// Its holder is gone: take it, and wait before writing anything.
    TakeOver,
    /// Somebody else holds it.
    Wait,
}

/// Decides about `lease`, which we have seen unchanged since `unchanged_since`.
pub fn decide(
    lease: Option<&LeaseSpec>,
    identity: &str,
    unchanged_since: Instant,
    now: Instant,
) -> Decision {
    let Some(lease) = lease else { return Decision::Create };
    match lease.holder_identity.as_deref() {
        None | Some("") if lease.renew_time.is_none() => Decision::TakeFirst,
        None | Some("") => Decision::Acquire,
        Some(holder) if holder == identity => Decision::Renew,
        Some(_) => {
            let duration = lease.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
            let duration = duration.map_or(LEASE_DURATION, Duration::from_secs);
            if now.duration_since(unchanged_since) >= duration {
                Decision::TakeOver
            } else {
                Decision::Wait
            }
        }
    }
}

/// For how long a candidate that has just written the lease waits before it lists and writes.
///
/// | decision | who may still write | for how long |
/// |---|---|---|
/// | `Acquire` | nobody: the lease was given back after the last write | |
/// | `TakeOver` | the holder before, requests that it sent before its renew deadline | [`REQUEST_TIMEOUT`] |
/// | `Renew` | a process of the same name before this one: likewise | [`REQUEST_TIMEOUT`] |
/// | `Create`, `TakeFirst` | a holder whose lease was deleted or replaced and that has not looked since: until its renew deadline, and then likewise | both |
pub fn wait_before_leading(decision: Decision) -> Duration {
    match decision {
        Decision::Acquire | Decision::Wait => Duration::ZERO,
        Decision::TakeOver | Decision::Renew => REQUEST_TIMEOUT,
        Decision::Create | Decision::TakeFirst => RENEW_DEADLINE + REQUEST_TIMEOUT,
    }
}

/// For how long writes may be sent. It ends by itself, also while the task that renews the lease
/// gets no time to run: a process that slept wakes up without it.
#[derive(Debug, Clone)]
pub struct Tenure(Option<watch::Receiver<Instant>>);

impl Tenure {
    /// Without end: for a process that is the only one.
    pub fn endless() -> Self {
        Self(None)
    }

    /// Whether nothing may be sent any more. A request sent before ends before the lease can pass
    /// on.
    pub fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(|renewed| renewed.borrow().elapsed() >= RENEW_DEADLINE)
    }
}

/// Why an attempt to read and write the lease came to nothing.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    /// The request was given up, so that a connection that swallows it costs an attempt and not the
    /// lease.
    #[error("no answer within {REQUEST_TIMEOUT:?}")]
    Late,
    /// The server's answer, or that it cannot be reached.
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
    /// The lease as last read, and since when it reads so.
    seen: Option<(Lease, Instant)>,
    /// Just before the last write of the lease that succeeded was sent. The others count from when
    /// it arrived, which is later than this and may be much earlier than its answer.
    renewed: watch::Sender<Instant>,
}

impl Candidate {
    /// A candidate named `identity` for the lease in `namespace`.
    pub fn new(client: Client, namespace: &str, identity: String) -> Self {
        let renewed = watch::Sender::new(Instant::now());
        Self { leases: Api::namespaced(client, namespace), identity, seen: None, renewed }
    }

    /// How long this candidate, once it leads, may write.
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
                        "waiting until nothing of a leader before can be under way"
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

    /// Keeps the lease for so long. Gives whether it is still ours then, and renewed at the end:
    /// the work begins with a lease that is fresh.
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

    /// [`attempt`](Self::attempt), given up after `limit`; none if it failed.
    async fn attempt_in(&mut self, limit: Duration) -> Option<Option<Decision>> {
        match tokio::time::timeout(limit, self.attempt()).await {
            Ok(Ok(decision)) => return Some(decision),
            Ok(Err(error)) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(error, "cannot read or write the Lease, trying again");
            }
            Err(_) => {
                tracing::warn!("the Lease could not be read and written in time, trying again")
            }
        }
        None
    }

    /// Renews until `stop`, then gives the lease back.
    ///
    /// # Errors
    /// Leadership is lost: the process has to end at once.
    pub async fn hold(&mut self, stop: CancellationToken) -> Result<(), LeadershipError> {
        loop {
            let left = RENEW_DEADLINE.saturating_sub(self.renewed.borrow().elapsed());
            tokio::select! {
                () = stop.cancelled() => {
                    self.give_back().await;
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

    /// Reads the lease and writes it if that is ours to do; gives the decision if we lead now.
    async fn attempt(&mut self) -> Result<Option<Decision>, AttemptError> {
        let lease = answered(self.leases.get_opt(CONTROLLER_LEASE)).await?;
        let now = Instant::now();
        let unchanged_since = self.observe(lease.as_ref(), now);
        // One without a spec is there, and nobody has held it.
        let spec = lease.as_ref().map(|l| l.spec.clone().unwrap_or_default());
        let decision = decide(spec.as_ref(), &self.identity, unchanged_since, now);
        let written = match (decision, lease) {
            (Decision::Wait, _) => return Ok(None),
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
            // Somebody was faster. If we lead, the next reading says who.
            Err(AttemptError::Request(kube::Error::Api(status)))
                if status.code == 409 && decision != Decision::Renew =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Since when the lease reads as it does.
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
        self.renewed(Lease { metadata, spec: None }, Decision::Create)
    }

    fn renewed(&self, mut lease: Lease, decision: Decision) -> Lease {
        let now = MicroTime(Timestamp::now());
        let old = lease.spec.take().unwrap_or_default();
        let ours = decision == Decision::Renew;
        let transitions = old.lease_transitions.unwrap_or(0)
            + i32::from(matches!(decision, Decision::Acquire | Decision::TakeOver));
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

    /// Lets the next one in without waiting. Called when nothing of ours is being written any more.
    async fn give_back(&self) {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.clear()).await {
            Ok(Ok(())) => tracing::info!("gave the Lease back"),
            Ok(Err(error)) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot give the Lease back"
                )
            }
            Err(_) => tracing::warn!("cannot give the Lease back in time"),
        }
    }

    /// Writes that nobody holds the lease. As it is now, since a renewal without an answer may have
    /// been served; unless it is another's.
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
