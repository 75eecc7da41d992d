//! Pods and groups that arrive, with their lifetimes.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use tessera_api::events::{self, EventReason};
use tessera_api::names::{POD_GROUP_ANNOTATION, POD_GROUP_SIZE_ANNOTATION};
use tessera_controller::core::clock::Moment;
use tessera_controller::core::effect::{ClaimChange, ClaimWrite};
use tessera_controller::core::event::{Change, WatchedObject};

use super::api_server::{ApiServer, GPU_MIB, Happening};
use super::{Agenda, DaySize, WATCH_LAG};
use crate::answers::clocks;
use crate::random::Random;
use crate::scale::{GPUS, allocated_on, claim, class, node_object, pod, slices};

/// Memory of shares, in MiB.
const SHARES_MIB: [u64; 4] = [10_000, 16_000, 24_000, 32_000];

/// Numbers of pods of groups, each of which asks for a whole GPU.
const GROUP_SIZES: [usize; 4] = [2, 4, 8, 16];

/// Of 100 arrivals, those that ask for a share and those that ask for one GPU; the others are
/// groups.
const SHARES_OF_100: usize = 80;
const GPUS_OF_100: usize = 12;

/// Memory that an arrival asks for on average, in MiB.
const MEAN_MIB: f64 = 0.8 * 20_500.0 + 0.12 * GPU_MIB as f64 + 0.08 * 7.5 * GPU_MIB as f64;

/// GPU memory that all arrivals would use if none waited, as a part of the cluster's.
const LOAD: f64 = 1.03;

/// A pod, or a group of equal pods.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    /// Number of pods.
    size: usize,
    mib: u64,
    priority: i32,
    lifetime: Duration,
}

/// A unit that has arrived.
#[derive(Debug)]
struct Arrived {
    unit: Unit,
    created: Moment,
    /// The controller has decided on it or refused it.
    is_answered: bool,
    bound: usize,
    ended: usize,
    is_evicted: bool,
}

/// The arrivals of a day.
pub(super) struct Arrivals {
    size: DaySize,
    random: Random,
    units: HashMap<usize, Arrived>,
    /// The unit of each pod.
    unit_of: HashMap<String, usize>,
    next: usize,
    decisions: Vec<Duration>,
    arrived: BTreeMap<&'static str, u64>,
}

impl Arrivals {
    pub(super) fn new(size: DaySize) -> Self {
        Self {
            size,
            random: Random::new(size.seed),
            units: HashMap::new(),
            unit_of: HashMap::new(),
            next: 0,
            decisions: Vec::new(),
            arrived: BTreeMap::new(),
        }
    }

    fn lifetime(&mut self) -> Duration {
        let cluster = (self.size.nodes * GPUS) as f64 * GPU_MIB as f64;
        let mean = LOAD * cluster / (self.size.rate as f64 * MEAN_MIB);
        Duration::from_secs_f64((mean * self.random.exponential()).clamp(1.0, 20.0 * mean))
    }

    /// Returns the objects of the cluster: on seven of ten GPUs shares, on a quarter a pod that
    /// has all of it.
    pub(super) fn running(&mut self, api: &mut ApiServer, agenda: &mut Agenda) -> Vec<Change> {
        let nodes = self.size.nodes;
        let mut changes = vec![Change::Applied(WatchedObject::Class(class().into()))];
        for node in 0..nodes {
            let of_node = slices(node).into_iter().map(|one| WatchedObject::Slice(one.into()));
            changes.extend(of_node.map(Change::Applied));
            changes.push(Change::Applied(WatchedObject::Node(node_object(node).into())));
        }
        let gpus = nodes * GPUS;
        let (shared, whole) = (gpus * 7 / 10, gpus / 4);
        let shares = self.size.shares.min(shared * 5);
        let mib = GPU_MIB / (shares.div_ceil(shared.max(1)) as u64).max(1);
        for share in 0..shares + whole {
            let (gpu, mib) = match share.checked_sub(shares) {
                Some(number) => (shared + number, GPU_MIB),
                None => (share % shared, mib),
            };
            let name = format!("running-{share}");
            let (pod, claim) = allocated_on(&name, gpu, mib, share);
            changes.extend(api.create(pod, claim, mib, None));
            let lifetime = self.lifetime();
            let unit = Unit { size: 1, mib, priority: 0, lifetime };
            self.note(std::slice::from_ref(&name), unit, Moment::START, true);
            agenda.add(Moment::START + lifetime, Happening::Ended(name));
        }
        changes
    }

    fn note(&mut self, names: &[String], unit: Unit, created: Moment, is_bound: bool) -> usize {
        self.next += 1;
        let number = self.next;
        let bound = if is_bound { unit.size } else { 0 };
        let is_answered = is_bound;
        let arrived = Arrived { unit, created, is_answered, bound, ended: 0, is_evicted: false };
        self.units.insert(number, arrived);
        self.unit_of.extend(names.iter().map(|name| (name.clone(), number)));
        number
    }

    /// Has the next unit arrive at a random time.
    pub(super) fn schedule(&mut self, agenda: &mut Agenda, now: Moment) {
        let pause = Duration::from_secs_f64(self.random.exponential() / self.size.rate as f64);
        agenda.add(now + pause, Happening::Arrival);
    }

    pub(super) fn arrive(&mut self, api: &mut ApiServer, agenda: &mut Agenda, now: Moment) {
        let unit = self.unit();
        self.create(unit, api, agenda, now);
        self.schedule(agenda, now);
    }

    fn unit(&mut self) -> Unit {
        let (size, mib) = match self.random.below(100) {
            kind if kind < SHARES_OF_100 => (1, SHARES_MIB[self.random.below(4)]),
            kind if kind < SHARES_OF_100 + GPUS_OF_100 => (1, GPU_MIB),
            _ => (GROUP_SIZES[self.random.below(4)], GPU_MIB),
        };
        let priority = match self.random.below(100) {
            0..60 => 0,
            60..90 => 100,
            _ => 1000,
        };
        Unit { size, mib, priority, lifetime: self.lifetime() }
    }

    /// Creates the pods of a unit.
    pub(super) fn create(
        &mut self,
        unit: Unit,
        api: &mut ApiServer,
        agenda: &mut Agenda,
        now: Moment,
    ) {
        let kind = match (unit.size, unit.mib) {
            (1, GPU_MIB) => "GPUs asked for",
            (1, _) => "shares asked for",
            _ => "groups asked for",
        };
        *self.arrived.entry(kind).or_default() += 1;
        let first = self.next + 1;
        let names: Vec<String> = (0..unit.size).map(|n| format!("unit-{first}-{n}")).collect();
        let number = self.note(&names, unit.clone(), now, false);
        let created = Time(Timestamp::from_second(clocks(now).wall).unwrap_or_default());
        for name in &names {
            let mut pod = pod(name, None);
            pod.metadata.creation_timestamp = Some(created.clone());
            pod.spec.get_or_insert_default().priority = Some(unit.priority);
            if unit.size > 1 {
                let annotations = [
                    (POD_GROUP_ANNOTATION, format!("unit-{number}")),
                    (POD_GROUP_SIZE_ANNOTATION, unit.size.to_string()),
                ];
                let annotations = annotations.map(|(key, value)| (key.to_owned(), value));
                pod.metadata.annotations = Some(annotations.into());
            }
            let claim = claim(name, &format!("{}Mi", unit.mib), Value::Null);
            let group = (unit.size > 1).then_some(number);
            for change in api.create(pod, claim, unit.mib, group) {
                agenda.add(now + WATCH_LAG, Happening::Delivered(change));
            }
        }
    }

    fn of_mut(&mut self, pod: &str) -> Option<&mut Arrived> {
        self.units.get_mut(self.unit_of.get(pod)?)
    }

    /// Counts the time of a decision, unless the pod was refused before.
    pub(super) fn decided(&mut self, write: &ClaimWrite, now: Moment) {
        let name = write.object.metadata.name.clone().unwrap_or_default();
        let is_allocation = matches!(write.change, ClaimChange::Allocate(_));
        let Some(unit) = self.of_mut(&name).filter(|unit| is_allocation && !unit.is_answered)
        else {
            return;
        };
        unit.is_answered = true;
        let took = now - unit.created;
        self.decisions.push(took);
    }

    /// Notes that the controller has said why a pod waits.
    pub(super) fn refused(&mut self, pod: &str, reason: EventReason) {
        if reason.name() != events::GROUP_INCOMPLETE.name()
            && let Some(unit) = self.of_mut(pod)
        {
            unit.is_answered = true;
        }
    }

    /// Notes that a pod is bound. Once all pods of its unit are, their end is due.
    ///
    /// # Panics
    /// A pod of its group has no devices.
    pub(super) fn bound(&mut self, pod: &str, api: &ApiServer, agenda: &mut Agenda, now: Moment) {
        let Some(number) = self.unit_of.get(pod).copied() else { return };
        let Some(unit) = self.units.get_mut(&number) else { return };
        unit.bound += 1;
        let names = (0..unit.unit.size).map(|n| format!("unit-{number}-{n}"));
        for other in names.clone() {
            let has_devices = api.get(&other).is_some_and(|other| !other.results().is_empty());
            assert!(has_devices, "{pod} is bound, and {other} of its group has no devices");
        }
        if unit.bound == unit.unit.size {
            let end = now + unit.unit.lifetime;
            names.for_each(|name| agenda.add(end, Happening::Ended(name)));
            let kind = if unit.unit.size > 1 { "groups run" } else { "pods run" };
            *self.arrived.entry(kind).or_default() += 1;
        }
    }

    pub(super) fn evicted(&mut self, pod: &str) {
        if let Some(unit) = self.of_mut(pod) {
            unit.is_evicted = true;
        }
    }

    /// Notes that a pod has ended. Returns the unit that its owner creates anew, once all of it has
    /// ended by eviction.
    pub(super) fn ended(&mut self, pod: &str) -> Option<Unit> {
        let number = self.unit_of.remove(pod)?;
        let unit = self.units.get_mut(&number)?;
        unit.ended += 1;
        if unit.ended < unit.unit.size {
            return None;
        }
        let unit = self.units.remove(&number)?;
        unit.is_evicted.then_some(unit.unit)
    }

    pub(super) fn decisions(&self) -> Vec<Duration> {
        self.decisions.clone()
    }

    /// Adds what became of the units.
    pub(super) fn count(&self, counts: &mut BTreeMap<&'static str, u64>) {
        counts.extend(&self.arrived);
        let waiting = |is_group: bool| {
            let units = self.units.values().filter(|unit| unit.bound < unit.unit.size);
            units.filter(|unit| (unit.unit.size > 1) == is_group).count() as u64
        };
        counts.insert("groups that wait at the end", waiting(true));
        counts.insert("pods that wait at the end", waiting(false));
    }
}
