//! The reservation of the pod that has waited longest: a request for much is not starved by requests for little.
//!
//! As in EASY backfilling only the first pod in order gets one. Without a clock and without knowing when pods will end, it is for
//! the node on which the least is taken: nobody younger adds to that, so the least that is taken anywhere only falls.

use tessera_api::reason::NodeReason;

use super::Planner;
use super::place::ToPlace;
use super::shapes::ShapeId;
use crate::cluster::NodeIndex;
use crate::fits;
use crate::model::{Node, PendingPod};
use crate::policy::{self, Outlook, Ranking};
use crate::predicate;

/// A node that is kept free for a pod.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) node: NodeIndex,
    /// Pods created after this are kept off, in seconds since the epoch.
    until: i64,
    pod: String,
}

impl Reservation {
    /// Whether it keeps the pod off the node. A pod that is tied to nodes by other claims of it is not.
    pub(super) fn keeps_off(&self, place: &ToPlace<'_>, node: NodeIndex) -> bool {
        self.node == node && place.pod.created > self.until && place.bounds.is_empty()
    }

    /// What a pod is told that is kept off.
    pub(super) fn reason(&self) -> NodeReason {
        NodeReason::KeptFree { pod: self.pod.clone() }
    }
}

impl Planner {
    /// Reserves a node for a pod that has to wait, if there is one that would suffice once it is emptied.
    pub(super) fn reserve(
        &mut self,
        place: &ToPlace<'_>,
        shape: ShapeId,
        patience: u32,
        steps: u64,
    ) -> Option<Reservation> {
        let nodes = self.suffice_emptied(shape, steps);
        let can_go = |node: &NodeIndex| {
            let Some(node) = &self.cluster.nodes[*node].node else { return false };
            let emptied = Node { used: Default::default(), ..(**node).clone() };
            predicate::fault(place.pod, &place.bounds, &emptied).is_none()
        };
        let order = |node: &NodeIndex| (self.taken(shape, *node), self.cluster.nodes[*node].order);
        let node = nodes.into_iter().filter(can_go).min_by_key(order)?;
        let PendingPod { namespace, name, created, .. } = place.pod;
        Some(Reservation { node, until: created + i64::from(patience), pod: format!("{namespace}/{name}") })
    }

    /// The nodes on which a shape would fit if nothing were taken of them; found out once as long as nodes reach the same.
    fn suffice_emptied(&mut self, shape: ShapeId, steps: u64) -> Vec<NodeIndex> {
        let layout = self.cluster.layout();
        let (shapes, mut ground) = self.parts();
        let entry = shapes.get_mut(shape);
        if let Some((_, nodes)) = entry.emptied.as_ref().filter(|(known, _)| *known == layout) {
            return nodes.clone();
        }
        let mut steps = steps;
        let count = ground.cluster.nodes.len();
        let would_fit =
            |node: &NodeIndex| fits::fits_emptied(&mut entry.shape, &mut ground, *node, &mut steps);
        let nodes: Vec<NodeIndex> = (0..count).filter(would_fit).collect();
        entry.emptied = Some((layout, nodes.clone()));
        nodes
    }

    /// How much of what the node reaches is taken.
    fn taken(&self, shape: ShapeId, node: NodeIndex) -> u64 {
        let Some(reach) = self.cluster.reach(node) else { return 0 };
        let outlook = Outlook { potential: self.forecast.potential(), cpu_left: 0, cpu_asked: 0 };
        let ranking = Ranking::new(reach, &self.cluster.interner, &reach.left, 0, outlook);
        policy::taken(&ranking, &self.shapes.get(shape).shape)
    }
}
