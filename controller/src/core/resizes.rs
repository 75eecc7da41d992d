//! Changes of the sizes of shares (ADR 137).
//!
//! What counts for a share is in `status.devices` of its claim, with the controller as its only
//! writer. What its containers are held to is the driver's. While one size becomes another, the
//! larger of both counts, so that at no moment more is granted than the GPU has:
//!
//! ```text
//! larger:  claim counts the new size --> driver applies it
//! smaller: driver applies the new size --> claim counts it
//! ```
//!
//! A GpuResize that is deleted changes nothing: what counts stays, and the driver follows it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use tessera_api::names::{ClaimName, ClaimUid, Namespace};
use tessera_api::resize::{
    GRANTED_CONDITION, GpuResize, GpuResizeStatus, REFUSED_REASON, SizedShare, same_sizes,
};
use tessera_index::{ResizePlan, ResizeRefusal};
use tessera_runtime::error_chain::chain;

use super::Step;
use super::clock::Moment;
use super::effect::{ClaimChange, Effect, ResizeReference, ResizeStatusWrite};
use super::writes::WritePurpose;

/// Time after which a resize is examined again that was refused, or whose status could not be
/// written.
const RETRY: Duration = Duration::from_secs(5);

/// Time after which a resize is examined again whose claim could not be written.
const BUSY: Duration = Duration::from_millis(500);

/// The most resizes that one step examines, so that a tenant who writes many delays no allocation.
const PER_STEP: usize = 64;

/// Reason of [`GRANTED_CONDITION`] where the driver will not apply the sizes.
const REFUSED_BY_DRIVER: &str = "RefusedByDriver";

type Key = (Namespace, ClaimName);

/// The GpuResizes.
#[derive(Debug, Default)]
pub(super) struct Resizes {
    objects: BTreeMap<Key, Arc<GpuResize>>,
    /// The resizes to be examined, because they or their claims have changed.
    due: BTreeSet<Key>,
    /// The resizes to be examined at a time.
    later: BTreeMap<Key, Moment>,
    /// The resizes whose status is being written.
    open: BTreeSet<Key>,
}

impl Resizes {
    /// Takes over a GpuResize.
    pub(super) fn apply(&mut self, object: &Arc<GpuResize>) {
        let Some(key) = key(&object.metadata) else { return };
        self.due.insert(key.clone());
        self.objects.insert(key, Arc::clone(object));
    }

    /// Removes a deleted GpuResize.
    pub(super) fn remove(&mut self, object: &GpuResize) {
        let Some(key) = key(&object.metadata) else { return };
        self.objects.remove(&key);
        self.due.remove(&key);
        self.later.remove(&key);
    }

    /// Notes that a claim has changed.
    pub(super) fn note_claim(&mut self, claim: &ResourceClaim) {
        if self.objects.is_empty() {
            return;
        }
        let key = key(&claim.metadata).filter(|key| self.objects.contains_key(key));
        self.due.extend(key);
    }

    /// Takes in the end of a write of a status.
    pub(super) fn status_ended(&mut self, resize: &ResizeReference, is_stored: bool, now: Moment) {
        let key = (resize.namespace.clone(), resize.name.clone());
        self.open.remove(&key);
        // A stored one is delivered by the watch.
        if !is_stored {
            self.later.insert(key, now + RETRY);
        }
    }

    /// Returns the resizes to examine now.
    fn take_due(&mut self, now: Moment) -> Vec<Key> {
        self.due.extend(self.later.extract_if(.., |_, at| *at <= now).map(|(key, _)| key));
        let is_free = |key: &&Key| !self.open.contains(*key);
        let taken: Vec<Key> = self.due.iter().filter(is_free).take(PER_STEP).cloned().collect();
        for key in &taken {
            self.due.remove(key);
            self.later.remove(key);
        }
        taken
    }
}

/// The decision about one resize.
struct Verdict {
    /// The shares; none if the claim has none.
    shares: Option<Shares>,
    /// The refusal; none = granted.
    refusal: Option<(&'static str, String)>,
    /// It is to be examined again although nothing changes that it depends on directly.
    is_tried_again: bool,
}

/// The shares of a claim.
struct Shares {
    claim: ClaimUid,
    node: String,
    /// The sizes that count now.
    current: Vec<SizedShare>,
    /// The sizes that the driver is to apply.
    wanted: Vec<SizedShare>,
    /// The sizes that count until it has.
    most: Vec<SizedShare>,
}

impl Shares {
    fn new(claim: &ClaimUid, plan: ResizePlan) -> Self {
        let ResizePlan { pool: node, current, wanted, most } = plan;
        Self { claim: claim.clone(), node, current, wanted, most }
    }

    /// Returns the sizes to be counted, if they are others than now.
    fn uncounted(&self, object: &GpuResize) -> Option<&Vec<SizedShare>> {
        let is_applied = is_about(object, &self.claim)
            && object.answer().is_some_and(|answer| answer.status == "True")
            && object.status.iter().all(|status| same_sizes(&status.granted, &self.wanted));
        let due = if is_applied { &self.wanted } else { &self.most };
        (!same_sizes(due, &self.current)).then_some(due)
    }
}

impl Step<'_> {
    /// Changes the sizes of shares, and tells drivers which to apply.
    pub(super) fn resize_shares(&mut self) {
        for key in self.state.resizes.take_due(self.now) {
            let Some(object) = self.state.resizes.objects.get(&key).cloned() else { continue };
            let verdict = self.verdict(&key, &object);
            self.conclude_resize(key, &object, verdict);
        }
        let Resizes { due, open, later, .. } = &self.state.resizes;
        // The end of a write is an event.
        let has_more = due.iter().any(|key| !open.contains(key));
        let next = later.values().min().copied();
        self.wake_at(if has_more { Some(self.now) } else { next });
    }

    fn verdict(&self, key: &Key, object: &GpuResize) -> Verdict {
        let index = &self.state.index;
        let Some(claim) = index.claim_of_name(&key.0, &key.1) else {
            // Its claim is an event.
            let refusal = Some(("NoClaim", ResizeRefusal::NoClaim.to_string()));
            return Verdict { shares: None, refusal, is_tried_again: false };
        };
        // What counts now, which is possible whatever else is not.
        let as_it_is = || index.plan_resize(claim, &BTreeMap::new()).ok();
        let refused = |reason, message, is_tried_again| {
            let shares = as_it_is().map(|plan| Shares::new(claim, plan));
            Verdict { shares, refusal: Some((reason, message)), is_tried_again }
        };
        if let Some((held, message)) = refused_by_driver(object, claim) {
            let mut verdict = refused(REFUSED_BY_DRIVER, message, false);
            // What the driver has left. It never exceeds what counts.
            verdict.shares.iter_mut().for_each(|shares| shares.wanted.clone_from(&held));
            return verdict;
        }
        let sizes = match object.sizes() {
            Ok(sizes) => sizes,
            Err(error) => return refused("Invalid", error.to_string(), false),
        };
        match index.plan_resize(claim, &sizes) {
            Ok(plan) => {
                let shares = Some(Shares::new(claim, plan));
                Verdict { shares, refusal: None, is_tried_again: false }
            }
            Err(refusal) => refused(refusal.reason(), chain(&refusal), refusal.may_end()),
        }
    }

    /// Writes what is to be counted; once nothing is, what the driver is to apply.
    fn conclude_resize(&mut self, key: Key, object: &GpuResize, verdict: Verdict) {
        let Verdict { shares, refusal, is_tried_again } = verdict;
        if let Some((shares, sizes)) =
            shares.as_ref().and_then(|shares| Some((shares, shares.uncounted(object)?.clone())))
        {
            let change = |_: &_| ClaimChange::Resize(sizes);
            let (claim, purpose) = (&shares.claim, WritePurpose::Resize);
            let is_started = !self.state.is_busy(claim, self.now)
                && self.write(claim, purpose, None, self.now, change);
            // The outcome of a write is an event.
            if !is_started {
                self.state.resizes.later.insert(key, self.now + BUSY);
            }
            return;
        }
        if is_tried_again {
            self.state.resizes.later.insert(key.clone(), self.now + RETRY);
        }
        let status = status(object, shares, refusal, self.wall);
        if is_reported(object, &status) {
            return;
        }
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let resize = ResizeReference { namespace: key.0.clone(), name: key.1.clone(), uid };
        self.state.resizes.open.insert(key);
        self.effects.push(Effect::WriteResizeStatus(ResizeStatusWrite { resize, status }));
    }
}

fn key(metadata: &ObjectMeta) -> Option<Key> {
    let namespace = Namespace::new(metadata.namespace.as_deref()?).ok()?;
    Some((namespace, ClaimName::new(metadata.name.as_deref()?).ok()?))
}

/// Returns true if the status is about this claim.
fn is_about(object: &GpuResize, claim: &ClaimUid) -> bool {
    let status = object.status.as_ref();
    status.is_some_and(|status| status.claim_uid.as_deref() == Some(claim.as_str()))
}

/// Returns the sizes that the driver has left, and its reason, if it has refused the present spec:
/// by its answer, or by an earlier one that the controller has taken over.
fn refused_by_driver(object: &GpuResize, claim: &ClaimUid) -> Option<(Vec<SizedShare>, String)> {
    let status = object.status.as_ref().filter(|_| is_about(object, claim))?;
    let is_present = |condition: &&Condition| {
        condition.observed_generation == object.metadata.generation && condition.status == "False"
    };
    let known = object.condition(GRANTED_CONDITION).filter(is_present);
    if let Some(known) = known.filter(|known| known.reason == REFUSED_BY_DRIVER) {
        return Some((status.granted.clone(), known.message.clone()));
    }
    let answer = object.answer().filter(is_present)?;
    let is_refused = answer.reason == REFUSED_REASON && !status.applied.is_empty();
    is_refused.then(|| (status.applied.clone(), answer.message.clone()))
}

/// Returns the controller's part of the status.
fn status(
    object: &GpuResize,
    shares: Option<Shares>,
    refusal: Option<(&'static str, String)>,
    wall: i64,
) -> GpuResizeStatus {
    let text = if refusal.is_none() { "True" } else { "False" };
    let granted = || ("Granted", "the GPUs have room for the sizes".to_owned());
    let (reason, message) = refusal.unwrap_or_else(granted);
    let now = Time(Timestamp::from_second(wall).unwrap_or_default());
    let before = object.condition(GRANTED_CONDITION).filter(|before| before.status == text);
    let condition = Condition {
        type_: GRANTED_CONDITION.to_owned(),
        status: text.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: object.metadata.generation,
        last_transition_time: before.map_or(now, |before| before.last_transition_time.clone()),
    };
    let conditions = vec![condition];
    let known = object.status.as_ref();
    let Some(Shares { claim, node, wanted, .. }) = shares else {
        // The number stays, so that no answer of before counts for a later claim.
        let grant = known.and_then(|known| known.grant);
        return GpuResizeStatus { grant, conditions, ..GpuResizeStatus::default() };
    };
    let is_same = known.is_some_and(|known| {
        known.granted == wanted && is_about(object, &claim) && known.node.as_ref() == Some(&node)
    });
    let grant = known.and_then(|known| known.grant).unwrap_or_default();
    GpuResizeStatus {
        node: Some(node),
        claim_uid: Some(claim.to_string()),
        granted: wanted,
        grant: Some(if is_same { grant } else { grant + 1 }),
        conditions,
        ..GpuResizeStatus::default()
    }
}

/// Returns true if the object has this status already, besides the driver's part.
fn is_reported(object: &GpuResize, status: &GpuResizeStatus) -> bool {
    let Some(known) = &object.status else { return false };
    (&known.node, &known.claim_uid, &known.granted, known.grant)
        == (&status.node, &status.claim_uid, &status.granted, status.grant)
        && object.condition(GRANTED_CONDITION) == status.conditions.first()
}
