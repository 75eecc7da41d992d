//! A small, pure API server around the core: it stores objects, carries out the writes of the core
//! in any order, and delivers changes and outcomes late, twice or not at all.
//!
//! It also checks after every step what has to hold at any time: see [`World::check`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tessera_allocator::PlanSettings;
use tessera_allocator::selector::CompiledSelector;
use tessera_api::names::{Namespace, PodName, ShareId};
use tessera_api::quantity::Quantity;
use tessera_api::quota::GpuQuotaStatus;
use tessera_api::resize::GpuResizeStatus;
use tessera_controller::core::clock::{Moment, Now};
use tessera_controller::core::effect::{
    BarrierOutcome, ClaimChange, ClaimWrite, Effect, EvictionPurpose, Evictions, Figures,
    MAX_OPEN_NOTICES, NominationWrite, Notice, NoticeId, PlaceholderChange, QuotaReference,
    ResizeReference, TemplateChange, TemplateReference, WriteId,
};
use tessera_controller::core::event::{
    Change, Event, EvictionOutcome, NominationOutcome, QuotaStatusOutcome, TemplateOutcome,
    WatchedKind, WatchedObject, WriteOutcome,
};
use tessera_controller::core::{Core, NominationPolicy, PreemptionPolicy, RecoverySettings};
use tessera_controller::node_groups::NodeGroups;
use tessera_dialect::Converter;

use crate::resizes::{self, Drivers};
use crate::{groups, objects};

const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// The memory and the cores of one GPU of [`objects::slice`].
const MEMORY: &str = "80Gi";
const CORES: &str = "100";

/// A write that the core has started.
struct OpenWrite {
    write: ClaimWrite,
    /// The allocation that it writes, if it writes one.
    allocation: Option<AllocationResult>,
    /// It was carried out, and its answer was lost.
    is_answer_lost: bool,
    /// It has ended, and the core has not been told.
    outcome: Option<WriteOutcome>,
}

/// The core, and all that it can see.
pub(crate) struct World {
    core: Core,
    now: Moment,
    /// The time of the next step, as the core asked for.
    wake: Option<Moment>,
    version: u64,
    objects: BTreeMap<(WatchedKind, String), Value>,
    /// The claims among them.
    claims: BTreeMap<String, ResourceClaim>,
    /// Changes by kind that have not been delivered.
    undelivered: BTreeMap<WatchedKind, VecDeque<Change>>,
    /// The last change of each kind that was delivered.
    delivered: BTreeMap<WatchedKind, Change>,
    /// Names of each kind that a watch has delivered.
    pub(crate) known: BTreeMap<(WatchedKind, String), Value>,
    open: BTreeMap<WriteId, OpenWrite>,
    ended: Vec<(WriteId, WriteOutcome)>,
    /// The effects of all steps.
    pub(crate) writes: Vec<ClaimWrite>,
    pub(crate) notices: Vec<Notice>,
    pub(crate) nominations: Vec<NominationWrite>,
    /// Nominations that have not ended, by name of the pod.
    open_nominations: BTreeMap<String, NominationWrite>,
    /// Writes of claim templates that have not ended.
    pub(crate) open_templates: BTreeMap<TemplateReference, TemplateChange>,
    /// Statuses of quotas that are being written.
    pub(crate) open_quotas: BTreeMap<QuotaReference, GpuQuotaStatus>,
    /// Statuses of resizes that are being written.
    pub(crate) open_resizes: BTreeMap<ResizeReference, GpuResizeStatus>,
    /// The drivers of the nodes, which apply resizes.
    pub(crate) drivers: Drivers,
    /// Writes of placeholder pods that have not ended.
    pub(crate) open_placeholders: BTreeMap<PodName, PlaceholderChange>,
    /// Evictions that have not ended, by name of the preemptor, or of the pod on an unfit GPU.
    pub(crate) open_evictions: BTreeMap<String, Evictions>,
    /// Figures of the last step.
    pub(crate) figures: Figures,
    shares: u64,
    /// Selectors that the core wants compiled, by namespace.
    compiling: BTreeMap<Namespace, Arc<str>>,
    /// Notices whose publication has not ended.
    open_notices: BTreeSet<NoticeId>,
    /// The notices that were taken by [`take_notices`](Self::take_notices).
    taken: usize,
    /// Devices may have less than is allocated of them.
    is_shrunk: bool,
}

impl World {
    /// Returns an empty cluster with our class, all kinds listed.
    pub(crate) fn new() -> Self {
        let mut world = Self::unlisted();
        let listed = WatchedKind::ALL.map(|kind| world.changed(Change::Listed(kind)));
        world.step(listed);
        world
    }

    /// Returns an empty cluster with our class, all kinds listed, of which a plan has this many
    /// steps for each pod.
    pub(crate) fn with_steps_per_pod(steps: u64) -> Self {
        let mut world = Self::new();
        let settings = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        world.core = Core::new(PlanSettings { steps_per_pod: steps, ..settings });
        WatchedKind::ALL.iter().for_each(|kind| world.relist(*kind));
        world
    }

    /// Returns an empty cluster with our class, all kinds listed, and this policy of nominations.
    pub(crate) fn with_nominations(policy: NominationPolicy) -> Self {
        let mut world = Self::new();
        let settings = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        world.core = Core::new(settings).nominating(policy);
        WatchedKind::ALL.iter().for_each(|kind| world.relist(*kind));
        world
    }

    /// Replaces the core by that of a new leader that evicts pods for trouble of their GPUs.
    pub(crate) fn recover(&mut self, settings: RecoverySettings) {
        let plans = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        let core = Core::new(plans).preempting(PreemptionPolicy::LowerPriority);
        self.lead(core.recovering(settings));
    }

    /// Replaces the core by that of a new leader with this converter, which lists everything.
    pub(crate) fn new_leader(&mut self, converter: Option<Converter>) {
        let settings = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        let core = Core::new(settings)
            .converting(converter.map(Arc::new))
            .preempting(PreemptionPolicy::LowerPriority);
        self.lead(core);
    }

    /// Replaces the core by that of a new leader that asks for nodes.
    pub(crate) fn ask_for_nodes(&mut self, settings: NodeGroups) {
        let plans = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        let core = Core::new(plans).preempting(PreemptionPolicy::LowerPriority);
        self.lead(core.asking_for_nodes(Some(settings)));
    }

    fn lead(&mut self, core: Core) {
        self.core = core;
        self.open_evictions.clear();
        self.open_placeholders.clear();
        // Its writes have numbers of their own.
        self.open.clear();
        self.ended.clear();
        self.open_templates.clear();
        self.open_quotas.clear();
        self.open_notices.clear();
        WatchedKind::ALL.iter().for_each(|kind| self.relist(*kind));
    }

    /// Carries out the write of a claim template as the API server does, and reports the outcome.
    /// The watch will deliver the change.
    pub(crate) fn write_template(&mut self, name: &str) -> TemplateOutcome {
        let (kind, exists) = (WatchedKind::Template, self.get(WatchedKind::Template, name));
        let change = self.open_template(name);
        let outcome = match (change, exists) {
            (TemplateChange::Create(_), Some(_)) => TemplateOutcome::Exists,
            (TemplateChange::Create(spec), None) => {
                let uid = format!("template-{}", self.version);
                self.put(kind, objects::template(name, &uid, json!(*spec)));
                TemplateOutcome::Created(Arc::new(read(self.get(kind, name).unwrap())))
            }
            (TemplateChange::Delete(uid), Some(object)) if object["metadata"]["uid"] == *uid => {
                self.delete(kind, name);
                TemplateOutcome::Gone
            }
            (TemplateChange::Delete(_), _) => TemplateOutcome::Gone,
        };
        self.end_template(name, outcome.clone());
        outcome
    }

    fn open_template(&self, name: &str) -> TemplateChange {
        let open = self.open_templates.iter().find(|(template, _)| template.name == name);
        open.unwrap_or_else(|| panic!("{name} is not being written")).1.clone()
    }

    /// Reports the outcome of the write of a claim template.
    pub(crate) fn end_template(&mut self, name: &str, outcome: TemplateOutcome) {
        let namespace = Namespace::new("default").unwrap();
        let template = TemplateReference { namespace, name: name.to_owned() };
        self.open_templates.remove(&template).expect("it is being written");
        self.step([Event::TemplateEnded { template, outcome }]);
    }

    /// Returns an empty cluster with our class, before any kind has been listed.
    pub(crate) fn unlisted() -> Self {
        let settings = PlanSettings { reservation_delay: None, ..PlanSettings::default() };
        let mut world = Self {
            core: Core::new(settings)
                .nominating(NominationPolicy::Always)
                .preempting(PreemptionPolicy::LowerPriority),
            now: Moment::START,
            wake: None,
            version: 0,
            objects: BTreeMap::new(),
            claims: BTreeMap::new(),
            undelivered: BTreeMap::new(),
            delivered: BTreeMap::new(),
            known: BTreeMap::new(),
            open: BTreeMap::new(),
            ended: Vec::new(),
            writes: Vec::new(),
            notices: Vec::new(),
            nominations: Vec::new(),
            open_nominations: BTreeMap::new(),
            open_templates: BTreeMap::new(),
            open_quotas: BTreeMap::new(),
            open_resizes: BTreeMap::new(),
            drivers: Drivers::default(),
            open_placeholders: BTreeMap::new(),
            open_evictions: BTreeMap::new(),
            figures: Figures::default(),
            shares: 0,
            compiling: BTreeMap::new(),
            open_notices: BTreeSet::new(),
            taken: 0,
            is_shrunk: false,
        };
        world.put(WatchedKind::Class, objects::class());
        world.deliver_all();
        world
    }

    /// Adds a node with this number of GPUs.
    pub(crate) fn add_node(&mut self, name: &str, gpus: usize) {
        self.put(WatchedKind::Node, objects::node(name));
        self.put(WatchedKind::Slice, objects::slice(name, gpus));
        self.deliver_all();
    }

    /// Adds a claim for one share, and a pod with it.
    pub(crate) fn add_pod(&mut self, name: &str, memory: &str) {
        self.put(WatchedKind::Claim, objects::claim(name, memory));
        self.put(WatchedKind::Pod, objects::pod(name, &[name]));
        self.deliver_all();
    }

    // Time and steps.

    /// Returns the time since the start.
    pub(crate) fn now(&self) -> Duration {
        self.now.since_start()
    }

    /// Lets time pass, with a step at its end and at each time that the core asked for.
    pub(crate) fn pass(&mut self, duration: Duration) {
        let end = self.now + duration;
        let mut steps = 0;
        while let Some(wake) = self.wake
            && wake < end
        {
            steps += 1;
            assert!(steps < 10_000, "the core asks for steps without end");
            self.now = self.now.max(wake);
            self.step([]);
        }
        self.now = end;
        self.step([]);
    }

    /// Returns true if the core asks for another step at once.
    pub(crate) fn is_due(&self) -> bool {
        self.wake.is_some_and(|wake| wake <= self.now)
    }

    fn changed(&self, change: Change) -> Event {
        Event::Changed { change, at: self.now }
    }

    /// Has the core take a step with this change.
    pub(crate) fn change(&mut self, change: Change) {
        let event = self.changed(change);
        self.step([event]);
    }

    /// Has the core take a step with these events, and takes over its effects.
    pub(crate) fn step(&mut self, events: impl IntoIterator<Item = Event>) {
        let wall = i64::try_from(self.now.since_start().as_secs()).unwrap();
        let output = self.core.step(Now { monotonic: self.now, wall }, events);
        self.wake = output.wake;
        self.figures = output.figures;
        for effect in output.effects {
            match effect {
                Effect::Write(write) => self.start(write),
                Effect::Nominate(nomination) => self.start_nomination(nomination),
                Effect::WriteTemplate(write) => {
                    let is_open = self.open_templates.contains_key(&write.template);
                    assert!(!is_open, "a template has one open write");
                    self.open_templates.insert(write.template.clone(), write.change);
                }
                Effect::WriteQuotaStatus(write) => {
                    let other = self.open_quotas.insert(write.quota, write.status);
                    assert!(other.is_none(), "a quota has one open write");
                }
                Effect::WriteResizeStatus(write) => {
                    let other = self.open_resizes.insert(write.resize, write.status);
                    assert!(other.is_none(), "a resize has one open write");
                }
                Effect::WritePlaceholder(write) => {
                    let other = self.open_placeholders.insert(write.pod, write.change);
                    assert!(other.is_none(), "a placeholder has one open write");
                }
                Effect::Evict(evictions) => self.start_evictions(evictions),
                Effect::Compile { namespace, expression } => {
                    let other = self.compiling.insert(namespace, expression);
                    assert!(other.is_none(), "a namespace has one selector at a time");
                }
                Effect::Notify(notice) => {
                    assert!(self.open_notices.insert(notice.id), "a notice is sent once at a time");
                    self.notices.push(notice);
                }
            }
        }
        assert!(self.open_notices.len() <= MAX_OPEN_NOTICES);
        self.check();
    }

    /// Compiles the selectors that the core asked for, and reports it. Returns their sizes in
    /// bytes.
    pub(crate) fn compile(&mut self) -> Vec<usize> {
        let compiling = std::mem::take(&mut self.compiling);
        compiling.values().for_each(|expression| drop(CompiledSelector::cached(expression)));
        let sizes = compiling.values().map(|expression| expression.len()).collect();
        self.step(compiling.into_keys().map(|namespace| Event::Compiled { namespace }));
        sizes
    }

    fn start(&mut self, write: ClaimWrite) {
        let reserved = write.object.status.iter().flat_map(|s| s.reserved_for.iter().flatten());
        match &write.change {
            ClaimChange::Release => {
                assert_eq!(reserved.count(), 0, "a reserved claim is never released");
            }
            ClaimChange::Deallocate => {
                let node = node_of(&write.object);
                for consumer in reserved {
                    let pod = self.known.get(&(WatchedKind::Pod, consumer.name.clone())).unwrap();
                    let bound = pod["spec"]["nodeName"].as_str().unwrap();
                    assert_ne!(Some(bound), node.as_deref(), "its pod may be using it there");
                }
            }
            ClaimChange::Conclude(BarrierOutcome::Complete) => self.check_complete(&write.object),
            ClaimChange::Conclude(BarrierOutcome::Failed) => {
                assert_ne!(reserved.count(), 0, "what is not reserved is released");
            }
            ClaimChange::Allocate(_) | ClaimChange::Restore(_) | ClaimChange::Resize(_) => {}
        }
        let allocation = match &write.change {
            ClaimChange::Allocate(draft) => {
                let shares = &mut self.shares;
                let share = || {
                    *shares += 1;
                    ShareId::new(format!("1f0c2d3e-9a41-7c3b-8e55-{shares:012x}")).unwrap()
                };
                Some(draft.render(&write.object, Time(Timestamp::UNIX_EPOCH), share))
            }
            ClaimChange::Restore(allocation) => Some((**allocation).clone()),
            ClaimChange::Release
            | ClaimChange::Deallocate
            | ClaimChange::Conclude(_)
            | ClaimChange::Resize(_) => None,
        };
        let uid = &write.object.metadata.uid;
        let is_open = self.open.values().any(|open| open.write.object.metadata.uid == *uid);
        assert!(!is_open, "a claim has one open write");
        let (id, copy) = (write.id, write.clone());
        let is_new = matches!(write.change, ClaimChange::Allocate(_));
        let open = OpenWrite { write, allocation, is_answer_lost: false, outcome: None };
        assert!(self.open.insert(id, open).is_none(), "a number is used once");
        assert!(self.ended.iter().all(|(ended, _)| *ended != id), "a number is used once");
        self.writes.push(copy);
        if let Some((used, hard)) = self.memory_quota().filter(|_| is_new) {
            assert!(used <= hard, "allocates {used} of {hard}");
        }
    }

    // Evictions.

    fn start_evictions(&mut self, evictions: Evictions) {
        let known = |name: &str| self.known.get(&(WatchedKind::Pod, name.to_owned())).unwrap();
        let priority = |pod: &Value| pod["spec"]["priority"].as_i64().unwrap_or_default();
        let (name, preemptor) = match &evictions.purpose {
            EvictionPurpose::Preemption { preemptor } => {
                (preemptor.name.to_string(), Some(known(preemptor.name.as_str())))
            }
            EvictionPurpose::Recovery => (evictions.victims[0].name.to_string(), None),
        };
        for victim in &evictions.victims {
            let pod = known(victim.name.as_str());
            let is_lower = preemptor.is_none_or(|preemptor| priority(pod) < priority(preemptor));
            assert!(is_lower, "of a strictly lower priority");
            assert!(pod["spec"]["nodeName"].is_string(), "it is bound");
            assert!(pod["metadata"]["deletionTimestamp"].is_null(), "it is not ending anyway");
        }
        assert!(!evictions.victims.is_empty());
        let other = self.open_evictions.insert(name, evictions);
        assert!(other.is_none(), "a pod has one eviction at a time");
    }

    /// Returns the names of the pods to evict for a pod.
    pub(crate) fn victims(&self, preemptor: &str) -> Vec<String> {
        let open = self.open_evictions.get(preemptor);
        let victims = open.iter().flat_map(|open| &open.victims);
        victims.map(|victim| victim.name.to_string()).collect()
    }

    /// Carries out the evictions for a pod until one has another outcome than `Evicted`, and
    /// reports them.
    pub(crate) fn end_evictions(
        &mut self,
        preemptor: &str,
        outcome: impl Fn(&str) -> EvictionOutcome,
    ) {
        let Some(open) = self.open_evictions.remove(preemptor) else { return };
        let mut outcomes = Vec::new();
        for victim in open.victims {
            let name = victim.name.to_string();
            let uid = victim.uid.as_str();
            let exists =
                self.get(WatchedKind::Pod, &name).is_some_and(|pod| pod["metadata"]["uid"] == uid);
            let outcome = if exists { outcome(&name) } else { EvictionOutcome::Gone };
            if outcome == EvictionOutcome::Evicted {
                self.edit(WatchedKind::Pod, &name, |pod| {
                    pod["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z".into();
                });
            }
            let is_end =
                matches!(outcome, EvictionOutcome::Refused { .. } | EvictionOutcome::Failed { .. });
            outcomes.push((victim, outcome));
            if is_end {
                break;
            }
        }
        self.step([Event::EvictionsEnded { purpose: open.purpose, outcomes }]);
    }

    /// Ends the pods that are being deleted.
    pub(crate) fn end_deleted_pods(&mut self) {
        for pod in self.names(WatchedKind::Pod) {
            let object = self.get(WatchedKind::Pod, &pod).unwrap();
            if object["metadata"]["deletionTimestamp"].is_string() {
                self.end_pod(&pod);
            }
        }
    }

    // Quotas.

    /// Returns the memory that is allocated or may come to be, and the limit of it that the core
    /// has seen; none without a quota.
    fn memory_quota(&self) -> Option<(Quantity, Quantity)> {
        let quota = self.known.iter().find(|((kind, _), _)| *kind == WatchedKind::Quota)?.1;
        let hard = quantity(quota["spec"]["hard"]["memory"].as_str()?);
        let taken = self.taken();
        let sum = taken
            .values()
            .fold(Quantity::ZERO, |sum, (memory, _)| sum.checked_add(*memory).unwrap());
        Some((sum, hard))
    }

    /// Returns the use in the status of the quota and the memory that is allocated, if they differ.
    pub(crate) fn wrong_quota_status(&self) -> Option<(Value, Quantity)> {
        let (used, _) = self.memory_quota()?;
        let status = &self.get(WatchedKind::Quota, objects::QUOTA)?["status"]["used"]["memory"];
        let is_right = status.as_str().is_some_and(|reported| quantity(reported) == used);
        (!is_right).then(|| (status.clone(), used))
    }

    /// Ends the write of a status of a quota.
    pub(crate) fn end_quota_status(&mut self, outcome: QuotaStatusOutcome) {
        let Some((quota, status)) = self.open_quotas.pop_first() else { return };
        let name = quota.name.as_str();
        if outcome == QuotaStatusOutcome::Stored {
            self.edit(WatchedKind::Quota, name, |object| object["status"] = json!(status));
        }
        self.step([Event::QuotaStatusEnded { quota, outcome }]);
    }

    // The store.

    /// Makes or replaces an object. The watch will deliver it.
    pub(crate) fn put(&mut self, kind: WatchedKind, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if kind == WatchedKind::Claim {
            self.claims.insert(name.clone(), read(object.clone()));
        }
        self.objects.insert((kind, name), object.clone());
        let change = Change::Applied(watched(kind, &object));
        self.undelivered.entry(kind).or_default().push_back(change);
    }

    /// Deletes an object. The watch will deliver it.
    pub(crate) fn delete(&mut self, kind: WatchedKind, name: &str) {
        if let Some(object) = self.objects.remove(&(kind, name.to_owned())) {
            self.version += 1;
            if kind == WatchedKind::Claim {
                self.claims.remove(name);
            }
            let change = Change::Deleted(watched(kind, &object));
            self.undelivered.entry(kind).or_default().push_back(change);
        }
    }

    pub(crate) fn get(&self, kind: WatchedKind, name: &str) -> Option<Value> {
        self.objects.get(&(kind, name.to_owned())).cloned()
    }

    /// Publishes a slice with less than is allocated.
    pub(crate) fn put_slice_of_less(&mut self, slice: Value) {
        self.is_shrunk = true;
        self.put(WatchedKind::Slice, slice);
        self.deliver_all();
    }

    /// Changes an object, as another client does.
    pub(crate) fn edit(&mut self, kind: WatchedKind, name: &str, edit: impl FnOnce(&mut Value)) {
        if let Some(mut object) = self.get(kind, name) {
            edit(&mut object);
            self.put(kind, object);
        }
    }

    /// Returns the names of all objects of a kind.
    pub(crate) fn names(&self, kind: WatchedKind) -> Vec<String> {
        let keys = self.objects.keys().filter(|(of, _)| *of == kind);
        keys.map(|(_, name)| name.clone()).collect()
    }

    fn claim(&self, name: &str) -> Option<ResourceClaim> {
        self.claims.get(name).cloned()
    }

    /// Returns the node and the device of an allocated claim.
    pub(crate) fn place(&self, claim: &str) -> Option<String> {
        let claim = self.claim(claim)?;
        let allocation = claim.status?.allocation?;
        let results = allocation.devices?.results?;
        Some(format!("{}/{}", results[0].pool, results[0].device))
    }

    // Watches.

    /// Delivers the next change of a kind.
    pub(crate) fn deliver(&mut self, kind: WatchedKind) {
        if let Some(change) = self.undelivered.entry(kind).or_default().pop_front() {
            self.note_known(kind, &change);
            self.delivered.insert(kind, change.clone());
            self.change(change);
        }
    }

    /// Delivers the last change of a kind once more.
    pub(crate) fn deliver_again(&mut self, kind: WatchedKind) {
        if let Some(change) = self.delivered.get(&kind).cloned() {
            self.note_known(kind, &change);
            self.change(change);
        }
    }

    /// Interrupts a watch without a loss.
    pub(crate) fn interrupt(&mut self) {
        self.change(Change::Interrupted);
    }

    /// Loses the undelivered changes of a kind: the watch is interrupted and lists again.
    pub(crate) fn relist(&mut self, kind: WatchedKind) {
        self.undelivered.remove(&kind);
        // A list is newer than all that was delivered before.
        self.delivered.remove(&kind);
        let known: Vec<_> = self.known.iter().filter(|((of, _), _)| *of == kind).collect();
        let is_gone = |name: &String, object: &Value| {
            let now = self.objects.get(&(kind, name.clone()));
            now.is_none_or(|now| now["metadata"]["uid"] != object["metadata"]["uid"])
        };
        let gone = known.iter().filter(|((_, name), object)| is_gone(name, object));
        let mut changes: Vec<Change> =
            gone.map(|(_, object)| Change::Deleted(watched(kind, object))).collect();
        changes.insert(0, Change::Interrupted);
        let now = self.objects.iter().filter(|((of, _), _)| *of == kind);
        changes.extend(now.map(|(_, object)| Change::Applied(watched(kind, object))));
        changes.push(Change::Listed(kind));
        for change in changes {
            self.note_known(kind, &change);
            self.change(change);
        }
    }

    fn note_known(&mut self, kind: WatchedKind, change: &Change) {
        let (object, is_there) = match change {
            Change::Applied(object) => (object, true),
            Change::Deleted(object) => (object, false),
            Change::Listed(_)
            | Change::NotServed(_)
            | Change::Interrupted
            | Change::Measured { .. } => return,
        };
        let object = written(object);
        let key = (kind, object["metadata"]["name"].as_str().unwrap().to_owned());
        if is_there {
            self.known.insert(key, object);
        } else {
            self.known.remove(&key);
        }
    }

    /// Delivers all changes.
    pub(crate) fn deliver_all(&mut self) {
        for kind in WatchedKind::ALL {
            while self.undelivered.get(&kind).is_some_and(|changes| !changes.is_empty()) {
                self.deliver(kind);
            }
        }
    }

    // Writes.

    /// Returns the open writes.
    pub(crate) fn open(&self) -> Vec<WriteId> {
        self.open.keys().copied().collect()
    }

    /// Returns the open write of a claim.
    pub(crate) fn open_of(&self, claim: &str) -> Option<WriteId> {
        let is_it = |open: &OpenWrite| open.write.object.metadata.name.as_deref() == Some(claim);
        self.open.iter().find(|(_, open)| is_it(open)).map(|(id, _)| *id)
    }

    /// Carries out a write, unless it has ended. Its answer is under way afterwards.
    pub(crate) fn carry_out(&mut self, id: WriteId) {
        let Some(open) = self.open.get(&id).filter(|open| open.outcome.is_none()) else { return };
        let object = &open.write.object;
        let name = object.metadata.name.clone().unwrap();
        let (allocation, is_answer_lost) = (open.allocation.clone(), open.is_answer_lost);
        let current = self.claim(&name).filter(|now| now.metadata.uid == object.metadata.uid);
        let version = &object.metadata.resource_version;
        let outcome = match current {
            Some(current) if current.metadata.resource_version == *version => {
                WriteOutcome::Stored(self.store(current, &open.write.change.clone(), allocation))
            }
            // An earlier sending of it was carried out after all.
            Some(current)
                if is_answer_lost
                    && allocation.is_some()
                    && current.status.as_ref().and_then(|s| s.allocation.as_ref())
                        == allocation.as_ref() =>
            {
                WriteOutcome::Stored(Arc::new(current))
            }
            current => WriteOutcome::Conflict(current.map(Arc::new)),
        };
        self.open.get_mut(&id).unwrap().outcome = Some(outcome);
        self.check();
    }

    fn store(
        &mut self,
        mut claim: ResourceClaim,
        change: &ClaimChange,
        allocation: Option<AllocationResult>,
    ) -> Arc<ResourceClaim> {
        let name = claim.metadata.name.clone().unwrap();
        if let ClaimChange::Conclude(outcome) = change {
            groups::conclude(&mut claim, *outcome);
            self.put(WatchedKind::Claim, json!(claim));
            return Arc::new(self.claim(&name).unwrap());
        }
        if let ClaimChange::Resize(sizes) = change {
            resizes::store(&mut claim, sizes);
            self.put(WatchedKind::Claim, json!(claim));
            return Arc::new(self.claim(&name).unwrap());
        }
        if allocation.is_some() && claim.metadata.finalizers.is_none() {
            claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
            self.put(WatchedKind::Claim, json!(claim));
            claim = self.claim(&name).unwrap();
        }
        let status = claim.status.take().unwrap_or_default();
        let reserved_for = match change {
            ClaimChange::Deallocate => None,
            _ => status.reserved_for,
        };
        claim.status = Some(ResourceClaimStatus {
            allocation,
            reserved_for,
            ..ResourceClaimStatus::default()
        });
        self.put(WatchedKind::Claim, json!(claim));
        Arc::new(self.claim(&name).unwrap())
    }

    /// Delivers the answer to a write that was carried out.
    pub(crate) fn answer(&mut self, id: WriteId) {
        if self.open.get(&id).is_none_or(|open| open.outcome.is_none()) {
            return;
        }
        let outcome = self.open.remove(&id).and_then(|open| open.outcome).unwrap();
        self.end(id, outcome);
    }

    fn end(&mut self, id: WriteId, outcome: WriteOutcome) {
        self.ended.push((id, outcome.clone()));
        self.step([Event::WriteEnded { id, outcome }]);
    }

    /// Delivers the answer to an ended write once more.
    pub(crate) fn answer_again(&mut self, which: usize) {
        if let Some((id, outcome)) = self.ended.get(which % self.ended.len().max(1)).cloned() {
            self.step([Event::WriteEnded { id, outcome }]);
        }
    }

    /// Loses the answer to a write: it is sent again.
    pub(crate) fn lose_answer(&mut self, id: WriteId) {
        if let Some(open) = self.open.get_mut(&id)
            && open.outcome.take().is_some()
        {
            open.is_answer_lost = true;
        }
    }

    /// Refuses a write that has not been carried out.
    pub(crate) fn refuse(&mut self, id: WriteId, is_lasting: bool) {
        let is_unsent = |open: &OpenWrite| open.outcome.is_none() && !open.is_answer_lost;
        if self.open.get(&id).is_some_and(is_unsent) {
            self.open.remove(&id);
            self.end(id, WriteOutcome::Refused { is_lasting });
        }
    }

    /// Has the API server drop a field of an allocation that has not been written, so that the
    /// write is undone. Other writes are left alone.
    pub(crate) fn drop_field(&mut self, id: WriteId, message: &str) {
        let is_unsent = |open: &OpenWrite| open.outcome.is_none() && !open.is_answer_lost;
        let Some(open) = self.open.get(&id).filter(|open| is_unsent(open)) else { return };
        let object = &open.write.object.metadata;
        let name = object.name.clone().unwrap();
        let current = self.claim(&name).filter(|now| now.metadata.uid == object.uid);
        let is_current = current
            .as_ref()
            .is_some_and(|now| now.metadata.resource_version == object.resource_version);
        if open.allocation.is_none() || !is_current {
            return;
        }
        self.open.remove(&id);
        self.edit(WatchedKind::Claim, &name, |_| {});
        let current = self.claim(&name).map(Arc::new);
        let message = message.to_owned();
        self.end(id, WriteOutcome::FieldsDropped { current, message });
    }

    /// Carries out and answers all writes, and delivers all changes, until nothing is under way.
    pub(crate) fn settle(&mut self) {
        loop {
            self.deliver_all();
            if let Some(pod) = self.open_nominations().first() {
                self.end_nomination(pod);
                continue;
            }
            if let Some(pod) = self.open_evictions.keys().next().cloned() {
                self.end_evictions(&pod, |_| EvictionOutcome::Evicted);
                continue;
            }
            if !self.open_quotas.is_empty() {
                self.end_quota_status(QuotaStatusOutcome::Stored);
                continue;
            }
            if !self.open_resizes.is_empty() {
                self.end_resize_status(true);
                continue;
            }
            let Some(id) = self.open.keys().next().copied() else { return };
            self.carry_out(id);
            self.answer(id);
        }
    }

    /// Returns true if the core awaits outcomes.
    pub(crate) fn has_open_writes(&self) -> bool {
        self.core.has_open_writes()
    }

    pub(crate) fn stop(&mut self) {
        self.core.stop();
    }

    // Nominations.

    fn start_nomination(&mut self, nomination: NominationWrite) {
        assert_ne!(nomination.node, nomination.replaced, "changes nothing");
        let pod = nomination.pod.name.to_string();
        self.nominations.push(nomination.clone());
        let other = self.open_nominations.insert(pod, nomination.clone());
        assert!(
            other.is_none_or(|other| other.pod.uid != nomination.pod.uid),
            "a pod has one open nomination"
        );
    }

    /// Returns the names of the pods with an open nomination.
    pub(crate) fn open_nominations(&self) -> Vec<String> {
        self.open_nominations.keys().cloned().collect()
    }

    /// Carries out the open nomination of a pod and answers it, as the executor does.
    pub(crate) fn end_nomination(&mut self, pod: &str) {
        let Some(nomination) = self.open_nominations.remove(pod) else { return };
        let object = self.get(WatchedKind::Pod, pod);
        let is_as_tested = |object: &Value| {
            let is_own = object["metadata"]["managedFields"].is_array();
            object["metadata"]["uid"] == nomination.pod.uid.as_str()
                && object["status"]["nominatedNodeName"] == json!(nomination.replaced)
                && is_own == nomination.replaced.is_some()
                && object["spec"]["nodeName"].is_null()
        };
        let outcome = match object.filter(is_as_tested) {
            None => NominationOutcome::Outdated,
            Some(object) => {
                let node = nomination.node.as_ref().map(ToString::to_string);
                self.put(WatchedKind::Pod, objects::nominated_by_controller(object, node));
                NominationOutcome::Stored
            }
        };
        self.answer_nomination(nomination, outcome);
    }

    /// Ends the open nomination of a pod with a failure, without carrying it out.
    pub(crate) fn fail_nomination(&mut self, pod: &str, outcome: NominationOutcome) {
        if let Some(nomination) = self.open_nominations.remove(pod) {
            self.answer_nomination(nomination, outcome);
        }
    }

    /// Returns the unbound pods with a nomination by the controller for a node on which none of
    /// their devices are.
    pub(crate) fn stale_nominations(&self) -> Vec<String> {
        let is_stale = |name: &String| {
            let pod = self.get(WatchedKind::Pod, name).unwrap();
            let Some((node, true)) = self.nomination(name) else { return false };
            let entries = pod["spec"]["resourceClaims"].as_array().unwrap();
            let places =
                entries.iter().filter_map(|e| self.place(e["resourceClaimName"].as_str().unwrap()));
            pod["spec"]["nodeName"].is_null()
                && !places.into_iter().any(|place| place.split('/').next() == Some(&node))
        };
        self.names(WatchedKind::Pod).into_iter().filter(is_stale).collect()
    }

    fn answer_nomination(&mut self, nomination: NominationWrite, outcome: NominationOutcome) {
        let NominationWrite { pod, node, .. } = nomination;
        self.step([Event::NominationEnded { pod: pod.uid, node, outcome }]);
    }

    /// Returns the nomination of a pod, and whether the controller has set it.
    pub(crate) fn nomination(&self, pod: &str) -> Option<(String, bool)> {
        let object = self.get(WatchedKind::Pod, pod)?;
        let node = object["status"]["nominatedNodeName"].as_str()?.to_owned();
        Some((node, object["metadata"]["managedFields"].is_array()))
    }

    // Notices.

    /// Returns the number of notices since the last call.
    pub(crate) fn take_notices(&mut self) -> usize {
        let new = self.notices.len() - self.taken;
        self.taken = self.notices.len();
        new
    }

    /// Returns the notices whose publication has not ended.
    pub(crate) fn open_notices(&self) -> Vec<NoticeId> {
        self.open_notices.iter().copied().collect()
    }

    /// Reports how the publication of the last notice has ended.
    pub(crate) fn report_notices(&mut self, is_delivered: bool) {
        self.report_notice(self.notices.last().unwrap().id, is_delivered);
    }

    /// Reports how the publication of a notice has ended.
    pub(crate) fn report_notice(&mut self, id: NoticeId, is_delivered: bool) {
        self.open_notices.remove(&id);
        self.step([Event::NoticeEnded { id, is_delivered }]);
    }

    /// Reports that every notice so far was delivered.
    pub(crate) fn report_all_notices(&mut self) {
        let ended = |id| Event::NoticeEnded { id, is_delivered: true };
        let events: Vec<Event> =
            std::mem::take(&mut self.open_notices).into_iter().map(ended).collect();
        self.step(events);
    }

    // Invariants.

    /// Checks that no device is allocated beyond its capacity, with all writes that may still be
    /// carried out, and that the core awaits the outcome of each open write.
    fn check(&self) {
        let (memory, cores) = (quantity(MEMORY), quantity(CORES));
        for (device, (of_memory, of_cores)) in self.taken().iter().filter(|_| !self.is_shrunk) {
            assert!(*of_memory <= memory, "{device}: {of_memory} of {memory}");
            assert!(*of_cores <= cores, "{device}: {of_cores} of {cores}");
        }
        assert_eq!(self.core.has_open_writes(), !self.open.is_empty());
        self.drivers.check(self.claims.values());
    }

    /// Returns the memory and cores taken of each device, with all writes that may still be carried
    /// out.
    fn taken(&self) -> BTreeMap<String, (Quantity, Quantity)> {
        let mut taken: BTreeMap<String, (Quantity, Quantity)> = BTreeMap::new();
        for claim in self.claims.values() {
            let stored = resizes::counted(claim);
            let may_come = self.open.values().filter(|open| {
                open.outcome.is_none()
                    && open.write.object.metadata.uid == claim.metadata.uid
                    && open.write.object.metadata.resource_version
                        == claim.metadata.resource_version
            });
            let mut coming = may_come.filter_map(|open| match &open.write.change {
                ClaimChange::Resize(sizes) => {
                    let mut claim = claim.clone();
                    resizes::store(&mut claim, sizes);
                    resizes::counted(&claim)
                }
                _ => open.allocation.clone(),
            });
            if let Some(allocation) = resizes::larger(stored, coming.next()) {
                add(&mut taken, &allocation);
            }
        }
        taken
    }

    /// Returns the unbound pods whose only claim is not allocated although a GPU has room for it.
    pub(crate) fn starving(&self) -> Vec<String> {
        let mut taken: BTreeMap<String, (Quantity, Quantity)> = BTreeMap::new();
        for claim in self.claims.values() {
            if let Some(allocation) = resizes::counted(claim) {
                add(&mut taken, &allocation);
            }
        }
        let devices = self.devices();
        let left = self.memory_quota().map(|(used, hard)| hard.saturating_sub(used));
        let fits = |memory: Quantity| {
            left.is_none_or(|left| memory <= left)
                && devices.iter().any(|device| {
                    let (of_memory, of_cores) = taken.get(device).copied().unwrap_or_default();
                    of_memory.checked_add(memory).unwrap() <= quantity(MEMORY)
                        && of_cores.checked_add(quantity("25")).unwrap() <= quantity(CORES)
                })
        };
        let is_starving = |name: &String| {
            let pod = self.get(WatchedKind::Pod, name).unwrap();
            let claims = pod["spec"]["resourceClaims"].as_array().unwrap();
            let claim = claims[0]["resourceClaimName"].as_str().unwrap();
            let Some(object) = self.get(WatchedKind::Claim, claim) else { return false };
            let exactly = &object["spec"]["devices"]["requests"][0]["exactly"];
            let memory = exactly["capacity"]["requests"]["memory"].as_str().unwrap();
            pod["spec"]["nodeName"].is_null()
                && pod["metadata"]["annotations"].is_null()
                && claims.len() == 1
                && self.place(claim).is_none()
                && fits(quantity(memory))
        };
        self.names(WatchedKind::Pod).into_iter().filter(is_starving).collect()
    }

    fn devices(&self) -> BTreeSet<String> {
        let slices = self.objects.iter().filter(|((kind, _), _)| *kind == WatchedKind::Slice);
        let devices = slices.flat_map(|(_, slice)| {
            let pool = slice["spec"]["pool"]["name"].as_str().unwrap();
            let devices = slice["spec"]["devices"].as_array().unwrap();
            devices.iter().map(move |device| format!("{pool}/{}", device["name"].as_str().unwrap()))
        });
        devices.collect()
    }
}

fn add(taken: &mut BTreeMap<String, (Quantity, Quantity)>, allocation: &AllocationResult) {
    let results = allocation.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    for result in results {
        let amount = |name: &str| {
            let amount = result.consumed_capacity.as_ref().and_then(|all| all.get(name));
            amount.map_or_else(Quantity::default, |amount| quantity(&amount.0))
        };
        let sums = taken.entry(format!("{}/{}", result.pool, result.device)).or_default();
        sums.0 = sums.0.checked_add(amount("memory")).unwrap();
        sums.1 = sums.1.checked_add(amount("cores")).unwrap();
    }
}

fn node_of(claim: &ResourceClaim) -> Option<String> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    Some(allocation.devices.as_ref()?.results.as_ref()?[0].pool.clone())
}

fn quantity(text: &str) -> Quantity {
    Quantity::parse(text).unwrap()
}

fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

fn watched(kind: WatchedKind, object: &Value) -> WatchedObject {
    let object = object.clone();
    match kind {
        WatchedKind::Slice => WatchedObject::Slice(Arc::new(read(object))),
        WatchedKind::TaintRule => WatchedObject::TaintRule(Arc::new(read(object))),
        WatchedKind::Class => WatchedObject::Class(Arc::new(read(object))),
        WatchedKind::Claim => WatchedObject::Claim(Arc::new(read(object))),
        WatchedKind::Template => WatchedObject::Template(Arc::new(read(object))),
        WatchedKind::Quota => WatchedObject::Quota(Arc::new(read(object))),
        WatchedKind::Defaults => WatchedObject::Defaults(Arc::new(read(object))),
        WatchedKind::Resize => WatchedObject::Resize(Arc::new(read(object))),
        WatchedKind::PodGroup => WatchedObject::PodGroup(Arc::new(read(object))),
        WatchedKind::VolcanoPodGroup => WatchedObject::VolcanoPodGroup(Arc::new(read(object))),
        WatchedKind::Node => WatchedObject::Node(Arc::new(read(object))),
        WatchedKind::Pod => WatchedObject::Pod(Arc::new(read(object))),
    }
}

fn written(object: &WatchedObject) -> Value {
    match object {
        WatchedObject::Slice(object) => json!(**object),
        WatchedObject::TaintRule(object) => json!(**object),
        WatchedObject::Class(object) => json!(**object),
        WatchedObject::Claim(object) => json!(**object),
        WatchedObject::Template(object) => json!(**object),
        WatchedObject::Quota(object) => json!(**object),
        WatchedObject::Defaults(object) => json!(**object),
        WatchedObject::Resize(object) => json!(**object),
        WatchedObject::PodGroup(object) => json!(**object),
        WatchedObject::VolcanoPodGroup(object) => json!(**object),
        WatchedObject::Node(object) => json!(**object),
        WatchedObject::Pod(object) => json!(**object),
    }
}
