//! The DeviceTaintRules that keep kube-scheduler from managed devices. The chart creates them; the
//! leader restores one that was changed or deleted.
//!
//! Without its rule kube-scheduler tries to allocate the devices again and again. The policy
//! `tessera-allocation` refuses what it writes, so no device has two allocators.
//!
//! A restored rule is owned by the policy that protects it: where the chart is changed to mode
//! stock, or manages a driver no longer, it deletes the policy too, and a rule that was restored at
//! that moment does not stay.

pub mod file;
mod report;

use std::time::Duration;

use futures::{StreamExt, future};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, DeviceTaintRuleSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::runtime::watcher::{self, DefaultBackoff, watcher};
use kube::{Api, Client, Resource};
use tessera_runtime::cluster::with_backoff;
use tokio::time::Instant;

pub use self::file::FenceRule;
use self::report::{Damage, Reports};
use crate::commit::{REQUEST_TIMEOUT, post_parameters};
use crate::leadership::Tenure;
use crate::metrics::Metrics;

/// Time for which a rule may be missing when this process begins to lead: an installation creates
/// the rule and starts this process at the same time.
const FIRST_WAIT: Duration = Duration::from_secs(5);

/// First and longest pause after a failure. Each failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Errors of restoring a rule.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The owner of the rule could not be read.
    #[error("cannot get ValidatingAdmissionPolicy {name}")]
    Policy {
        /// The policy.
        name: String,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// There is no owner.
    #[error(
        "ValidatingAdmissionPolicy {0} does not exist: the chart is being uninstalled or manages the driver no longer; otherwise apply the chart again"
    )]
    NoPolicy(String),
    /// The rule could not be written.
    #[error("cannot {verb} it")]
    Write {
        /// The verb of the request.
        verb: &'static str,
        /// The cause.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server does not answer.
    #[error("no answer within {REQUEST_TIMEOUT:?}")]
    NoAnswer,
    /// This process does not lead any more.
    #[error("another process leads")]
    TenureOver,
}

/// Keeps the rules as the chart has them.
pub struct FenceRestorer {
    api: Api<DeviceTaintRule>,
    policies: Api<ValidatingAdmissionPolicy>,
    wanted: Vec<FenceRule>,
    reports: Reports,
    metrics: Metrics,
    tenure: Tenure,
}

impl FenceRestorer {
    /// Returns a restorer of these rules. `identity` is the reporting instance of its events.
    pub fn new(client: &Client, wanted: Vec<FenceRule>, identity: &str, metrics: Metrics) -> Self {
        Self {
            api: Api::all(client.clone()),
            policies: Api::all(client.clone()),
            wanted,
            reports: Reports::new(client.clone(), identity),
            metrics,
            tenure: Tenure::endless(),
        }
    }

    /// Returns the restorer with writes restricted to `tenure`.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { tenure, ..self }
    }

    /// Keeps the rules for ever.
    pub async fn run(self) {
        future::join_all(self.wanted.iter().map(|wanted| self.keep(wanted))).await;
    }

    /// Keeps one rule.
    async fn keep(&self, wanted: &FenceRule) {
        let fields = format!("metadata.name={}", wanted.name());
        let config = watcher::Config::default().fields(&fields);
        let events = with_backoff(watcher(self.api.clone(), config), DefaultBackoff::default());
        let mut events = std::pin::pin!(events);
        let mut seen = Seen::default();
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(Ok(event)) => seen.observe(event, wanted.name()),
                    Some(Err(error)) => {
                        let error = &error as &dyn std::error::Error;
                        tracing::warn!(error, "watch of DeviceTaintRules failed; restarting it");
                    }
                    None => return,
                },
                () = sleep_until(seen.retry) => {}
            }
            if seen.is_listed {
                self.mend(wanted, &mut seen).await;
            }
        }
    }

    /// Restores the rule if it is not as wanted, and sets when to try again.
    async fn mend(&self, wanted: &FenceRule, seen: &mut Seen) {
        let damage = seen.damage(wanted);
        self.metrics.set_fence_missing(wanted.name(), damage.is_some());
        let Some(damage) = damage else {
            seen.end_damage();
            return;
        };
        let since = *seen.damaged.get_or_insert_with(Instant::now);
        let is_installing = damage == Damage::Missing && !seen.was_there;
        if is_installing && since.elapsed() < FIRST_WAIT {
            seen.retry = Some(since + FIRST_WAIT);
            return;
        }
        match self.restore(wanted, seen.live.as_ref()).await {
            Ok(restored) => {
                self.metrics.set_fence_missing(wanted.name(), false);
                self.metrics.fence_restores.inc();
                self.reports.restored(&restored, damage, since.elapsed()).await;
                (seen.live, seen.was_there) = (Some(restored), true);
                seen.end_damage();
            }
            Err(error) => {
                let (name, error) = (wanted.name(), &error as &dyn std::error::Error);
                tracing::error!(name, error, "cannot restore the DeviceTaintRule, retrying");
                seen.pause_after_failure();
            }
        }
    }

    /// Creates the rule, or gives it the wanted spec.
    async fn restore(
        &self,
        wanted: &FenceRule,
        live: Option<&DeviceTaintRule>,
    ) -> Result<DeviceTaintRule, RestoreError> {
        let request = async {
            let parameters = post_parameters();
            match live {
                Some(live) => {
                    let rule = DeviceTaintRule { spec: wanted.spec().clone(), ..live.clone() };
                    self.check_tenure()?;
                    let written = self.api.replace(wanted.name(), &parameters, &rule).await;
                    written.map_err(|source| write_error("update", source))
                }
                None => {
                    let rule = owned(wanted.object().clone(), self.owner(wanted).await?);
                    self.check_tenure()?;
                    let written = self.api.create(&parameters, &rule).await;
                    written.map_err(|source| write_error("create", source))
                }
            }
        };
        let answered = tokio::time::timeout(REQUEST_TIMEOUT, request).await;
        answered.unwrap_or(Err(RestoreError::NoAnswer))
    }

    fn check_tenure(&self) -> Result<(), RestoreError> {
        if self.tenure.is_over() { Err(RestoreError::TenureOver) } else { Ok(()) }
    }

    /// Returns the owner of the rule if this process creates it.
    async fn owner(&self, wanted: &FenceRule) -> Result<OwnerReference, RestoreError> {
        let name = wanted.policy();
        match self.policies.get_opt(&name).await {
            Ok(policy) => policy
                .as_ref()
                .and_then(|policy| policy.owner_ref(&()))
                .ok_or(RestoreError::NoPolicy(name)),
            Err(error) => Err(RestoreError::Policy { name, source: Box::new(error) }),
        }
    }
}

fn write_error(verb: &'static str, source: kube::Error) -> RestoreError {
    RestoreError::Write { verb, source: Box::new(source) }
}

fn owned(rule: DeviceTaintRule, owner: OwnerReference) -> DeviceTaintRule {
    let metadata = ObjectMeta { owner_references: Some(vec![owner]), ..rule.metadata };
    DeviceTaintRule { metadata, ..rule }
}

/// The state of a rule, from its watch.
struct Seen {
    live: Option<DeviceTaintRule>,
    is_listed: bool,
    /// It existed at some time since this process began to lead.
    was_there: bool,
    /// The time since which it is not as wanted.
    damaged: Option<Instant>,
    /// The time of the next attempt.
    retry: Option<Instant>,
    /// The pause after the next failure.
    pause: Duration,
}

impl Default for Seen {
    fn default() -> Self {
        Self {
            live: None,
            is_listed: false,
            was_there: false,
            damaged: None,
            retry: None,
            pause: FIRST_PAUSE,
        }
    }
}

impl Seen {
    fn observe(&mut self, event: watcher::Event<DeviceTaintRule>, name: &str) {
        match event {
            watcher::Event::Init => (self.live, self.is_listed) = (None, false),
            watcher::Event::InitApply(rule) | watcher::Event::Apply(rule) => {
                if rule.meta().name.as_deref() == Some(name) {
                    (self.live, self.was_there) = (Some(rule), true);
                }
            }
            watcher::Event::InitDone => self.is_listed = true,
            // The watch lags behind own writes.
            watcher::Event::Delete(rule) => {
                self.live.take_if(|live| live.meta().uid == rule.meta().uid);
            }
        }
    }

    fn end_damage(&mut self) {
        (self.damaged, self.retry, self.pause) = (None, None, FIRST_PAUSE);
    }

    fn pause_after_failure(&mut self) {
        self.retry = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    fn damage(&self, wanted: &FenceRule) -> Option<Damage> {
        match &self.live {
            None => Some(Damage::Missing),
            Some(live) if !has_spec(live, wanted.spec()) => Some(Damage::Changed),
            Some(_) => None,
        }
    }
}

/// Compares specs without the time that the API server sets.
fn has_spec(rule: &DeviceTaintRule, wanted: &DeviceTaintRuleSpec) -> bool {
    let timeless = |spec: &DeviceTaintRuleSpec| {
        let mut spec = spec.clone();
        spec.taint.time_added = None;
        spec
    };
    timeless(&rule.spec) == timeless(wanted)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => future::pending().await,
    }
}
