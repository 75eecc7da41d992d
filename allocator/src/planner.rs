//! The planner: interned cluster state and cached search results.

mod budget;
mod class_reasons;
mod classes;
mod fair_share;
mod group;
mod group_kinds;
mod group_topology;
mod last_plan;
mod node_choice;
mod node_tests;
mod observe;
mod pass;
mod place;
mod pod_to_place;
mod quotas;
mod refusals;
mod renewal;
mod reservation;
mod samples;
mod shape_cache;
mod turns;
mod unchanged;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tessera_api::names::{DeviceClassName, Namespace, NodeName};

use crate::backlog::Backlog;
use crate::cluster::Cluster;
use crate::feasibility::{self, FitContext};
use crate::features::FeatureGates;
use crate::forecast::Forecast;
use crate::fragmentation::Potential;
use crate::model::{
    Claim, ClusterSnapshot, DeviceClass, DeviceId, DeviceLoad, DeviceResult, DeviceUsage, Node,
    PendingPod, PoolId, PoolTopology, Slice,
};
use crate::node_selector;
use crate::outcome::{AllocationPlan, ClaimAllocation, GroupShortfall, PlanWork, RefusalCause};
use crate::policy::Policy;
use crate::quota::QuotaState;
use crate::search::{SearchFailure, SearchOutcome};
use crate::settings::PlanSettings;
use crate::shape::{Chosen, Selections, Shape};

pub use budget::LONG_SEARCH;
pub use classes::ClassId;
use classes::PodClasses;
use fair_share::FairShare;
pub(crate) use group_kinds::GroupInBacklog;
use group_kinds::RefusedGroups;
pub(crate) use last_plan::LastPlan;
use node_tests::NodeTests;
use observe::AcceptedTypes;
use pod_to_place::PodToPlace;
use shape_cache::{ShapeCache, ShapeId};
use turns::Turns;

/// Plans pods on a cluster and caches search results per node until the node changes.
///
/// The owner reports every change of the cluster to the planner. Planning does not change the
/// cluster state: a decision counts as usage only after [`set_device_use`](Self::set_device_use).
/// The same cluster, pods and settings give the same plan, independent of earlier calls, as long as
/// the steps suffice. [`Policy::LeastFragmentation`] is the exception: it learns the expected
/// requests from the pods that were planned.
#[derive(Debug, Default)]
pub struct Planner {
    cluster: Cluster,
    selections: Selections,
    shapes: ShapeCache,
    forecast: Forecast,
    accepted: AcceptedTypes,
    fair_share: FairShare,
    classes: PodClasses,
    /// Work since the begin of the plan.
    work: PlanWork,
    node_tests: NodeTests,
    /// Quotas of each namespace that has one.
    quotas: BTreeMap<Namespace, Vec<QuotaState>>,
    /// Namespaces whose selectors are not evaluated.
    withheld: BTreeSet<Namespace>,
    /// Namespaces for whose pods no long search begins.
    without_long_searches: BTreeSet<Namespace>,
    /// The causes of the groups that the last plan refused.
    group_causes: HashMap<GroupShortfall, Arc<RefusalCause>>,
    /// The groups that the last plan refused, by kind.
    refused_groups: RefusedGroups,
    /// Number of changes that are not those of nodes: see [`PlanInputs`](last_plan::PlanInputs).
    other_changes: u64,
}

/// Error of [`Planner::allocate_on`].
#[derive(Debug, Clone, PartialEq)]
pub enum AllocateError {
    /// The claims do not fit on the node.
    NoFit {
        /// True if the node sees an inconsistent pool; upstream reports that instead.
        invalid_pool: bool,
    },
    /// The search failed, as upstream's would.
    Failed(SearchFailure),
    /// The steps did not suffice.
    OutOfSteps,
}

impl Planner {
    /// Creates a planner for an empty cluster with these feature gates.
    pub fn new(features: FeatureGates) -> Self {
        Self { cluster: Cluster::new(features), ..Self::default() }
    }

    /// Creates a planner for the cluster in `snapshot`.
    pub fn from_snapshot(snapshot: &ClusterSnapshot, features: FeatureGates) -> Self {
        let mut planner = Self::new(features);
        snapshot.classes.values().for_each(|class| planner.set_class(class));
        snapshot.slices.values().for_each(|slice| planner.set_slice(slice));
        snapshot
            .topology
            .iter()
            .for_each(|(pool, topology)| planner.set_topology(pool, Some(topology)));
        planner.cluster.set_usage(&snapshot.usage);
        for (namespace, quotas) in &snapshot.quotas {
            planner.set_quotas(namespace, quotas.clone());
        }
        snapshot.nodes.values().for_each(|node| planner.set_node(node));
        planner
    }

    /// Adds or replaces a slice.
    pub fn set_slice(&mut self, slice: &Arc<Slice>) {
        self.reset_if_full();
        self.cluster.set_slice(slice);
    }

    /// Resets all caches when most entries must belong to objects that no longer exist.
    fn reset_if_full(&mut self) {
        if self.cluster.is_full() {
            self.clear_caches();
            self.cluster.renumber();
            // GPU types are numbered anew.
            self.forecast = Forecast::default();
        }
    }

    /// Removes the slice with this name.
    pub fn remove_slice(&mut self, name: &str) {
        self.cluster.remove_slice(name);
    }

    /// Sets the topology of a pool; `None` means unknown.
    pub fn set_topology(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        self.other_changes += 1;
        self.cluster.set_topology(pool, topology);
    }

    /// Adds or replaces a node.
    pub fn set_node(&mut self, node: &Arc<Node>) {
        self.cluster.set_node(node);
    }

    /// Removes a node.
    pub fn remove_node(&mut self, name: &NodeName) {
        self.cluster.remove_node(name);
    }

    /// Adds or replaces a DeviceClass.
    pub fn set_class(&mut self, class: &Arc<DeviceClass>) {
        if self.cluster.classes.get(&class.name) == Some(class) {
            return;
        }
        self.forget_class(&class.name);
        self.cluster.classes.insert(class.name.clone(), Arc::clone(class));
    }

    /// Removes a DeviceClass.
    pub fn remove_class(&mut self, name: &DeviceClassName) {
        self.forget_class(name);
        self.cluster.classes.remove(name);
    }

    /// Drops results that depend on the DeviceClass.
    fn forget_class(&mut self, name: &DeviceClassName) {
        self.other_changes += 1;
        self.shapes.forget_device_class(name);
        self.classes.forget_device_class(name);
        self.accepted.forget_impossible();
    }

    /// Sets the quotas of a namespace, with what allocated claims count against them.
    pub fn set_quotas(&mut self, namespace: &Namespace, quotas: Vec<QuotaState>) {
        self.other_changes += 1;
        if quotas.is_empty() {
            self.quotas.remove(namespace);
        } else {
            self.quotas.insert(namespace.clone(), quotas);
        }
    }

    /// Sets the consumption of a device; `None` means unused.
    pub fn set_device_use(&mut self, device: &DeviceId, used: Option<&DeviceUsage>) {
        self.cluster.set_use(device, used);
    }

    /// Sets the measured load of a device; `None` means unknown.
    pub fn set_device_load(&mut self, device: &DeviceId, load: Option<DeviceLoad>) {
        self.cluster.set_load(device, load);
    }

    /// Collects the reachable devices of every node. Otherwise that is done when a node is first
    /// searched.
    pub fn collect_devices(&mut self) {
        (0..self.cluster.nodes.len()).for_each(|node| self.cluster.gather(node));
    }

    /// Drops all cached results about shapes of claims; keeps the cluster state.
    pub fn clear_caches(&mut self) {
        self.other_changes += 1;
        self.shapes.clear();
        self.classes.forget_results();
        self.selections.clear();
    }

    /// Sets the maximum number of reasons of nodes that are kept between plans, each 200 to 300
    /// bytes. Classes of pods beyond it keep only the numbers of devices by reason, and are
    /// explained anew on all nodes. The default is 400,000.
    pub fn keep_reasons(&mut self, at_most: usize) {
        self.classes.max_reasons = at_most;
    }

    /// Returns the forecast of future requests, which [`Policy::LeastFragmentation`] uses.
    pub fn forecast(&self) -> &Potential {
        self.forecast.potential()
    }

    /// Sets the namespaces for whose pods no selector is compiled or evaluated. A pod that needs it
    /// is undecided; results that are known are used.
    pub fn withhold_selectors(&mut self, of: BTreeSet<Namespace>) {
        if self.withheld != of {
            self.other_changes += 1;
            self.withheld = of;
        }
    }

    /// Leaves the compilation of selectors above 400 bytes to the caller: see
    /// [`AllocationPlan::to_compile`]. Otherwise a plan compiles them, which takes up to 50 ms
    /// each.
    pub fn leave_long_selectors(&mut self) {
        self.selections.leave_long_selectors();
    }

    /// Sets the namespaces for whose pods no search of a node begins that is known to need more
    /// than [`LONG_SEARCH`] steps. Such a pod is undecided.
    pub fn withhold_long_searches(&mut self, of: BTreeSet<Namespace>) {
        if self.without_long_searches != of {
            self.other_changes += 1;
            self.without_long_searches = of;
        }
    }

    /// Decides for each pod which devices its pending claims get on which node.
    ///
    /// See [`plan`](crate::plan()).
    pub fn plan(&mut self, pods: &[PendingPod], settings: PlanSettings) -> AllocationPlan {
        self.reset_if_full();
        pass::plan(self, Turns::of(pods), settings).0
    }

    /// Decides for each pod of the backlog, like [`plan`](Self::plan).
    ///
    /// Pods that were refused with their class wait in its queue, and the plan has refusals of
    /// their own only for the first and the last of them. With
    /// [`steps_for_reasons`](PlanSettings::steps_for_reasons), it has none for a class that is
    /// refused as before, only the [renewed](AllocationPlan::renewed) reasons. The decided pods
    /// stay in the backlog until the caller removes them.
    pub fn plan_backlog(
        &mut self,
        backlog: &mut Backlog,
        settings: PlanSettings,
    ) -> AllocationPlan {
        self.reset_if_full();
        let inputs = self.inputs(settings);
        if let Some(plan) =
            backlog.last_plan.as_ref().and_then(|last| last.for_inputs(&inputs, settings.now))
        {
            return plan;
        }
        // While it holds causes, a change of reasons copies those of all nodes.
        backlog.last_plan = None;
        let (plan, with_class) = pass::plan(self, Turns::of_backlog(backlog), settings);
        let mut has_moved = false;
        for (pod, class) in &with_class {
            has_moved |= backlog.refused_with(pod, *class);
        }
        if !has_moved {
            backlog.last_plan = LastPlan::keep(&plan, self.inputs(settings), settings.now);
        }
        plan
    }

    /// Decides on devices for the pending claims of a pod that is bound to `node`.
    ///
    /// Only this node is considered, whatever its conditions. No node is reserved for the pod, and
    /// its requests do not count for the forecast.
    pub fn plan_bound_pod(
        &mut self,
        node: &NodeName,
        pod: &PendingPod,
        settings: PlanSettings,
    ) -> AllocationPlan {
        self.reset_if_full();
        pass::plan_on(self, node, pod, settings)
    }

    /// Searches one node for devices for these claims, all of them together.
    ///
    /// The conditions of the node do not matter. No device is consumed, and the requests do not
    /// count for the forecast. With [`Policy::FirstFit`] the result equals upstream's.
    ///
    /// # Errors
    /// Returns an error if the claims do not fit, the search fails, or `steps` do not suffice.
    pub fn allocate_on(
        &mut self,
        node: &NodeName,
        claims: &[Arc<Claim>],
        policy: Policy,
        steps: u64,
    ) -> Result<Vec<ClaimAllocation>, AllocateError> {
        let nothing = AllocateError::NoFit { invalid_pool: false };
        let index = self.cluster.node_index(node).ok_or(nothing)?;
        let shape = self.shapes.of(claims, 0, &mut self.cluster, &mut self.selections, policy);
        let mut steps = steps;
        let (shapes, mut context) = self.search_context();
        match feasibility::search(
            &mut shapes.get_mut(shape).shape,
            &mut context,
            index,
            0,
            &mut steps,
        ) {
            SearchOutcome::Found(chosen) => {
                Ok(self.claim_allocations(shape, claims, index, &chosen))
            }
            SearchOutcome::Infeasible => {
                let invalid_pool = self
                    .cluster
                    .reachable(index)
                    .is_some_and(crate::cluster::ReachableDevices::has_invalid_pool);
                Err(AllocateError::NoFit { invalid_pool })
            }
            SearchOutcome::Failed(_, failure) => Err(AllocateError::Failed(failure)),
            SearchOutcome::OutOfSteps => Err(AllocateError::OutOfSteps),
        }
    }

    /// Returns the number of nodes on which these claims fit. Results are cached until the node
    /// changes.
    pub fn count_fits(&mut self, claims: &[Arc<Claim>], policy: Policy, steps: u64) -> usize {
        let shape = self.shapes.of(claims, 0, &mut self.cluster, &mut self.selections, policy);
        let (shapes, mut context) = self.search_context();
        let entry = shapes.get_mut(shape);
        let mut left = steps;
        entry.feasibility.refresh(&mut entry.shape, &mut context, &mut left, steps);
        entry.feasibility.len()
    }

    /// Splits into the shapes and the context in which they are searched.
    fn search_context(&mut self) -> (&mut ShapeCache, FitContext<'_>) {
        let Self { cluster, selections, shapes, forecast, work, .. } = self;
        (shapes, FitContext { cluster, selections, forecast, work })
    }

    /// Begins a plan: its work is counted from now on.
    fn begin_plan(&mut self) {
        self.take_work();
        self.classes.begin_plan();
    }

    /// Ends a plan with this number of turns, and of classes that had none. Returns its work.
    fn end_plan(&mut self, turns: usize, unchanged: usize) -> PlanWork {
        self.classes.end_plan(turns + unchanged);
        let [turns, unchanged] = [turns, unchanged].map(|n| u64::try_from(n).unwrap_or(u64::MAX));
        PlanWork { turns, unchanged, ..self.take_work() }
    }

    fn take_work(&mut self) -> PlanWork {
        let selector_evaluations = self.selections.take_evaluations();
        PlanWork { selector_evaluations, ..std::mem::take(&mut self.work) }
    }

    /// Returns the class of a pod with these pending claims.
    fn class_of(&mut self, pod: &PendingPod, claims: &[Arc<Claim>], policy: Policy) -> ClassId {
        self.classes.of(pod, claims, policy, &mut self.work.pods_classified)
    }

    /// Returns the class of a pod with all claims that are not allocated.
    pub(crate) fn class_of_all(&mut self, pod: &PendingPod, policy: Policy) -> ClassId {
        let claims = PodToPlace::all_of(pod).pending;
        self.class_of(pod, &claims, policy)
    }

    /// Returns the shape of the class, whose pods have these claims.
    fn shape_of_class(
        &mut self,
        class: ClassId,
        claims: &[Arc<Claim>],
        cpu_milli: u64,
        policy: Policy,
    ) -> ShapeId {
        let Self { cluster, selections, shapes, classes, .. } = self;
        let known = classes.get(class).shape.filter(|shape| shapes.reuse(*shape));
        known.unwrap_or_else(|| {
            let shape = shapes.of(claims, cpu_milli, cluster, selections, policy);
            classes.get_mut(class).shape = Some(shape);
            shape
        })
    }

    /// Converts chosen devices to allocations.
    fn claim_allocations(
        &self,
        shape: ShapeId,
        claims: &[Arc<Claim>],
        node: usize,
        chosen: &[Vec<Chosen>],
    ) -> Vec<ClaimAllocation> {
        let Some(reachable) = self.cluster.reachable(node) else { return Vec::new() };
        let name = &self.cluster.nodes[node].name;
        let shape = &self.shapes.get(shape).shape;
        let allocation = |(c, claim): (usize, &Arc<Claim>)| {
            let devices = chosen.get(c).map_or(&[][..], Vec::as_slice);
            let result = |chosen: &Chosen| self.result(shape, c, chosen, reachable);
            ClaimAllocation {
                claim: claim.uid.clone(),
                results: devices.iter().map(result).collect(),
                nodes: node_selector::of(devices, reachable, name),
            }
        };
        claims.iter().enumerate().map(allocation).collect()
    }

    fn result(
        &self,
        shape: &Shape,
        claim: usize,
        chosen: &Chosen,
        reachable: &crate::cluster::ReachableDevices,
    ) -> DeviceResult {
        let features = self.cluster.features();
        let index = shape.claims[claim].alternatives(chosen.request).start + chosen.alternative;
        let alternative = &shape.alternatives[index];
        let candidate = &reachable.candidates[chosen.candidate];
        let device = candidate.device();
        let shared = device.shared && features.consumable_capacity;
        let consumed = match alternative.demand(device, features) {
            Ok(crate::capacity::Demand::Takes(amounts)) if shared => amounts,
            _ => Default::default(),
        };
        DeviceResult {
            request: alternative.request.name.clone(),
            device: candidate.id(),
            shared,
            consumed,
            admin: alternative.request.admin == Some(true),
            sharing: alternative.sharing(),
            binding: device.binding.clone().filter(|_| features.binding_conditions),
        }
    }
}
