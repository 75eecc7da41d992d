//! The planner: the cluster in numbers, and what has been found out about it.

mod fair_share;
mod keep;
mod observe;
mod place;
mod shapes;

use std::sync::Arc;

use tessera_api::names::{DeviceClassName, NodeName};

use crate::cluster::Cluster;
use crate::features::Features;
use crate::fits::{self, Ground};
use crate::forecast::Forecast;
use crate::fragmentation::Potential;
use crate::model::{
    Claim, DeviceClass, DeviceId, DeviceResult, DeviceUse, Node, PoolId, PoolTopology, Slice,
    Snapshot,
};
use crate::node_selector;
use crate::outcome::{Allotment, Plan};
use crate::plan::Settings;
use crate::policy::Policy;
use crate::search::{Chosen, Ended, Failure};
use crate::shape::{Selections, Shape};

use fair_share::FairShare;
use observe::Accepted;
use shapes::{ShapeId, Shapes};

/// Plans pods on a cluster, and remembers what it has found out about each node until the node
/// changes.
///
/// It is told of changes, one by one, and is worth what it is told: whoever owns it is the only one
/// to feed it. Planning changes nothing of the cluster: what a plan has decided counts as taken
/// once [`set_use`](Self::set_use) says so. The same cluster, pods and settings give the same plan,
/// whatever came before, as long as the steps suffice. Only [`Policy::LeastFragmentation`] goes by
/// what came before: it learns which requests are to be expected from the pods that it is asked to
/// plan.
#[derive(Debug, Default)]
pub struct Planner {
    cluster: Cluster,
    selections: Selections,
    shapes: Shapes,
    forecast: Forecast,
    accepted: Accepted,
    fair_share: FairShare,
}

/// Why claims get no devices on a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Unallocated {
    /// They do not fit.
    NoFit {
        /// A pool that the node sees contradicts itself: upstream then reports that instead.
        invalid_pool: bool,
    },
    /// The search had to be stopped, as upstream's would be.
    Failed(Failure),
    /// The steps did not suffice.
    OutOfSteps,
}

impl Planner {
    /// A planner for an empty cluster with these feature gates.
    pub fn new(features: Features) -> Self {
        Self { cluster: Cluster::new(features), ..Self::default() }
    }

    /// A planner for a cluster.
    pub fn of(snapshot: &Snapshot, features: Features) -> Self {
        let mut planner = Self::new(features);
        snapshot.classes.values().for_each(|class| planner.set_class(class));
        snapshot.slices.values().for_each(|slice| planner.set_slice(slice));
        snapshot
            .topology
            .iter()
            .for_each(|(pool, topology)| planner.set_topology(pool, Some(topology)));
        planner.cluster.set_usage(&snapshot.usage);
        snapshot.nodes.values().for_each(|node| planner.set_node(node));
        planner
    }

    /// A slice was made or changed.
    pub fn set_slice(&mut self, slice: &Arc<Slice>) {
        self.bound_memory();
        self.cluster.set_slice(slice);
    }

    /// Begins anew where most of what is remembered must be of what is long gone.
    fn bound_memory(&mut self) {
        if self.cluster.is_full() {
            self.forget();
            self.cluster.renumber();
            // Types of GPU have other numbers now.
            self.forecast = Forecast::default();
        }
    }

    /// The slice of this name is gone.
    pub fn remove_slice(&mut self, name: &str) {
        self.cluster.remove_slice(name);
    }

    /// Says how the devices of a pool are joined; `None` where that is not known.
    pub fn set_topology(&mut self, pool: &PoolId, topology: Option<&Arc<PoolTopology>>) {
        self.cluster.set_topology(pool, topology);
    }

    /// A node was made or changed.
    pub fn set_node(&mut self, node: &Arc<Node>) {
        self.cluster.set_node(node);
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &NodeName) {
        self.cluster.remove_node(name);
    }

    /// A class was made or changed.
    pub fn set_class(&mut self, class: &Arc<DeviceClass>) {
        self.forget_classes();
        self.cluster.classes.insert(class.name.clone(), Arc::clone(class));
    }

    /// A class is gone.
    pub fn remove_class(&mut self, name: &DeviceClassName) {
        self.forget_classes();
        self.cluster.classes.remove(name);
    }

    /// Forgets what was found out with the classes as they were.
    fn forget_classes(&mut self) {
        self.shapes.clear();
        self.accepted.forget_impossible();
    }

    /// Says what is taken of a device; nothing where there is no use.
    pub fn set_use(&mut self, device: &DeviceId, used: Option<&DeviceUse>) {
        self.cluster.set_use(device, used);
    }

    /// Works out what every node reaches. Without it, that is done for a node when somebody first
    /// asks.
    pub fn gather(&mut self) {
        (0..self.cluster.nodes.len()).for_each(|node| self.cluster.gather(node));
    }

    /// Forgets all that was found out about shapes of claims, and nothing about the cluster.
    pub fn forget(&mut self) {
        self.shapes.clear();
        self.selections = Selections::default();
    }

    /// What is expected of the requests to come: what [`Policy::LeastFragmentation`] goes by.
    pub fn expected(&self) -> &Potential {
        self.forecast.potential()
    }

    /// Decides for each pod on which node its pending claims get which devices: see
    /// [`plan`](crate::plan()).
    pub fn plan(&mut self, pods: &[crate::model::PendingPod], settings: Settings) -> Plan {
        self.bound_memory();
        place::plan(self, pods, settings)
    }

    /// Decides on devices for the pending claims of a pod that is bound to `node`: there and
    /// nowhere else, whatever the state of the node. No node is kept free for the pod, and its
    /// request is not counted among those that are expected.
    pub fn plan_on(
        &mut self,
        node: &NodeName,
        pod: &crate::model::PendingPod,
        settings: Settings,
    ) -> Plan {
        self.bound_memory();
        place::plan_on(self, node, pod, settings)
    }

    /// Looks for devices for these claims, all of them together, on one node, whatever the state of
    /// the node; nothing is taken, and the claims are not counted among the requests that are
    /// expected. With [`Policy::FirstFit`] the answer is upstream's.
    ///
    /// # Errors
    /// There are none, or it cannot be told.
    pub fn allocate_on(
        &mut self,
        node: &NodeName,
        claims: &[Arc<Claim>],
        policy: Policy,
        steps: u64,
    ) -> Result<Vec<Allotment>, Unallocated> {
        let nothing = Unallocated::NoFit { invalid_pool: false };
        let index = self.cluster.node_index(node).ok_or(nothing)?;
        let shape = self.shapes.of(claims, 0, &mut self.cluster, &mut self.selections, policy);
        let mut steps = steps;
        let (shapes, mut ground) = self.parts();
        match fits::search(&mut shapes.get_mut(shape).shape, &mut ground, index, 0, &mut steps) {
            Ended::Found(chosen) => Ok(self.allotments(shape, claims, index, &chosen)),
            Ended::None => {
                let invalid_pool =
                    self.cluster.reach(index).is_some_and(crate::cluster::Reach::has_invalid_pool);
                Err(Unallocated::NoFit { invalid_pool })
            }
            Ended::Failed(_, failure) => Err(Unallocated::Failed(failure)),
            Ended::OutOfSteps => Err(Unallocated::OutOfSteps),
        }
    }

    /// Whether claims of this shape fit on each node, by name: what
    /// [`allocate_on`](Self::allocate_on) says of it, remembered until the node changes.
    pub fn count_fits(&mut self, claims: &[Arc<Claim>], policy: Policy, steps: u64) -> usize {
        let shape = self.shapes.of(claims, 0, &mut self.cluster, &mut self.selections, policy);
        let (shapes, mut ground) = self.parts();
        let entry = shapes.get_mut(shape);
        let mut left = steps;
        entry.fits.refresh(&mut entry.shape, &mut ground, &mut left, steps);
        entry.fits.len()
    }

    /// The shapes, and what they are searched on.
    fn parts(&mut self) -> (&mut Shapes, Ground<'_>) {
        let Self { cluster, selections, shapes, forecast, .. } = self;
        (shapes, Ground { cluster, selections, forecast })
    }

    /// Turns what was chosen into results.
    fn allotments(
        &self,
        shape: ShapeId,
        claims: &[Arc<Claim>],
        node: usize,
        chosen: &[Vec<Chosen>],
    ) -> Vec<Allotment> {
        let Some(reach) = self.cluster.reach(node) else { return Vec::new() };
        let name = &self.cluster.nodes[node].name;
        let shape = &self.shapes.get(shape).shape;
        let allotment = |(c, claim): (usize, &Arc<Claim>)| {
            let devices = chosen.get(c).map_or(&[][..], Vec::as_slice);
            let result = |chosen: &Chosen| self.result(shape, c, chosen, reach);
            Allotment {
                claim: claim.uid.clone(),
                results: devices.iter().map(result).collect(),
                nodes: node_selector::of(devices, reach, name),
            }
        };
        claims.iter().enumerate().map(allotment).collect()
    }

    fn result(
        &self,
        shape: &Shape,
        claim: usize,
        chosen: &Chosen,
        reach: &crate::cluster::Reach,
    ) -> DeviceResult {
        let features = self.cluster.features();
        let place = shape.claims[claim].alternatives(chosen.request).start + chosen.alternative;
        let alternative = &shape.alternatives[place];
        let candidate = &reach.candidates[chosen.candidate];
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
