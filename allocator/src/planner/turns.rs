//! The turns of a plan: which pod is planned next.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, btree_map};
use std::iter::Peekable;

use super::classes::ClassId;
use super::group_kinds::GroupInBacklog;
use crate::backlog::{Backlog, FirstTurn, OrderedPod, PlanOrder, Queue};
use crate::model::{PendingPod, PodUid};

/// The turns that are left of a plan. Pods come in the order of priority and age, deferred ones
/// after all others. Of the queue of a class at most one pod has a turn at a time.
pub(super) struct Turns<'p> {
    /// First turns of a backlog, in order.
    first: Peekable<btree_map::Iter<'p, PlanOrder, FirstTurn>>,
    /// All other turns.
    others: BinaryHeap<Reverse<InHeap<'p>>>,
    backlog: Option<&'p Backlog>,
}

/// The turn of a pod.
#[derive(Clone)]
pub(super) struct Turn<'p> {
    pub(super) pod: &'p PendingPod,
    pub(super) order: Cow<'p, PlanOrder>,
    /// Class in whose queue the pod is.
    pub(super) class: Option<ClassId>,
    /// Of a group in a backlog.
    pub(super) group: Option<&'p GroupInBacklog>,
    /// Comes after all pods that are not deferred.
    pub(super) is_deferred: bool,
    /// Comes after all deferred pods that were not refused: otherwise the pods that have not been
    /// reached since would never be planned.
    was_refused: bool,
}

/// A turn that compares by its time.
struct InHeap<'p>(Turn<'p>);

impl<'p> Turns<'p> {
    /// Returns the turns of these pods.
    pub(super) fn of(pods: &'p [PendingPod]) -> Self {
        let turn = |pod| Turn::new(pod, Cow::Owned(PlanOrder::of(pod)), None);
        let others = pods.iter().map(|pod| Reverse(InHeap(turn(pod)))).collect();
        Self { first: btree_map::Iter::default().peekable(), others, backlog: None }
    }

    /// Returns the turns of a backlog.
    pub(super) fn of_backlog(backlog: &'p Backlog) -> Self {
        let first = backlog.first_turns().peekable();
        Self { first, others: BinaryHeap::new(), backlog: Some(backlog) }
    }

    /// Returns the pods that have a turn now.
    pub(super) fn pods(&self) -> Vec<&'p PendingPod> {
        let mut others: Vec<&Turn<'p>> =
            self.others.iter().map(|Reverse(InHeap(turn))| turn).collect();
        others.sort_unstable_by(|a, b| a.order.cmp(&b.order));
        let first = self.first.clone().map(|(_, turn)| &*turn.pod);
        first.chain(others.into_iter().map(|turn| turn.pod)).collect()
    }

    /// Returns the UIDs of all pending pods.
    pub(super) fn pending(&self) -> BTreeSet<&'p PodUid> {
        match self.backlog {
            Some(backlog) => backlog.uids().collect(),
            None => self.others.iter().map(|Reverse(InHeap(turn))| &turn.pod.uid).collect(),
        }
    }

    /// Returns the next turn.
    pub(super) fn next(&mut self) -> Option<Turn<'p>> {
        let is_first = match (self.first.peek(), self.others.peek()) {
            (Some((order, _)), Some(Reverse(InHeap(other)))) => {
                other.is_deferred || **order < *other.order
            }
            (first, _) => first.is_some(),
        };
        if is_first {
            let (order, FirstTurn { pod, class, group }) = self.first.next()?;
            let turn = Turn::new(pod, Cow::Borrowed(order), *class);
            return Some(Turn { group: group.as_deref(), ..turn });
        }
        self.others.pop().map(|Reverse(InHeap(turn))| turn)
    }

    /// Gives the pod another turn, after all pods that are not deferred.
    pub(super) fn defer(&mut self, turn: Turn<'p>, was_refused: bool) {
        self.others.push(Reverse(InHeap(Turn { is_deferred: true, was_refused, ..turn })));
    }

    /// Gives a turn to `pod`, which is in the same queue as the pod of `turn`.
    pub(super) fn follow(&mut self, turn: &Turn<'p>, (order, pod): OrderedPod<'p>) {
        let next = Turn { pod, order: Cow::Borrowed(order), ..turn.clone() };
        self.others.push(Reverse(InHeap(next)));
    }

    /// Returns the queue that the pod is in.
    pub(super) fn queue(&self, turn: &Turn<'p>) -> Option<&'p Queue> {
        self.backlog?.queue(turn.class?)
    }
}

impl<'p> Turn<'p> {
    fn new(pod: &'p PendingPod, order: Cow<'p, PlanOrder>, class: Option<ClassId>) -> Self {
        Self { pod, order, class, group: None, is_deferred: false, was_refused: false }
    }
}

impl InHeap<'_> {
    fn key(&self) -> (bool, bool, &PlanOrder) {
        (self.0.is_deferred, self.0.was_refused, &self.0.order)
    }
}

impl Ord for InHeap<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for InHeap<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for InHeap<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for InHeap<'_> {}
