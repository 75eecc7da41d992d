//! Pending pods between plans.
//!
//! Pods that a plan refused for a reason of their class wait in the queue of that class. The next
//! plan tries the first of them. It tries the second only if the first is not refused, because
//! capacity only shrinks in a plan. So a plan costs the number of classes, not of pods. Groups are
//! in no queue; of equal ones each plan tries the first.
//!
//! ```text
//! insert --> single --refused with its class--> queue of the class: first, ..., last
//!    ^         |                                                      |
//!    '- change of the pod, of its claims -- remove <------------------'
//! ```

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, btree_map};
use std::ops::Bound;
use std::sync::Arc;

use tessera_api::names::{Namespace, PodName};

use crate::model::{PendingPod, PodUid};
use crate::planner::{ClassId, GroupInBacklog, LastPlan};

/// Pending pods, kept between the plans of [`Planner::plan_backlog`](crate::Planner::plan_backlog).
#[derive(Debug, Default)]
pub struct Backlog {
    pods: BTreeMap<PodUid, Entry>,
    /// Pods that each plan tries first: those that are not in a queue, and the first of each
    /// queue.
    first: BTreeMap<PlanOrder, FirstTurn>,
    queues: BTreeMap<ClassId, Queue>,
    /// Number of pods that are decided together with another one.
    together: usize,
    /// The last plan, unless a pod has changed since.
    pub(crate) last_plan: Option<Box<LastPlan>>,
}

#[derive(Debug)]
struct Entry {
    pod: Arc<PendingPod>,
    /// Class in whose queue the pod is.
    class: Option<ClassId>,
    /// Of a pod that is decided together with others.
    group: Option<Arc<GroupInBacklog>>,
}

/// A pod that each plan tries first.
#[derive(Debug)]
pub(crate) struct FirstTurn {
    pub(crate) pod: Arc<PendingPod>,
    /// Class in whose queue the pod is.
    pub(crate) class: Option<ClassId>,
    /// Of a pod that is decided together with others.
    pub(crate) group: Option<Arc<GroupInBacklog>>,
}

/// A pod and its place in the order of planning.
pub(crate) type OrderedPod<'b> = (&'b PlanOrder, &'b PendingPod);

/// Refused pods of one class.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pods: BTreeMap<PlanOrder, Arc<PendingPod>>,
    /// Time before which no pod of the queue has an open reservation window, in seconds since the
    /// epoch.
    pub(crate) no_window_before: Cell<Option<i64>>,
}

/// Order of pods in a plan: by priority, then age, then names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlanOrder(Reverse<i32>, i64, Namespace, PodName, PodUid);

impl PlanOrder {
    /// Returns the place of a pod.
    pub fn of(pod: &PendingPod) -> Self {
        let PendingPod { priority, created, namespace, name, uid, .. } = pod;
        Self(Reverse(*priority), *created, namespace.clone(), name.clone(), uid.clone())
    }
}

/// A class of refused pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedClass<'b> {
    /// The class.
    pub id: ClassId,
    /// Number of its pods.
    pub pods: usize,
    /// Its last pod in the order of planning. Each plan explains it, for all but the first one.
    pub last: &'b PodUid,
}

impl Backlog {
    /// Adds a pod, or replaces it by its present state. The next plan tries it, unless it is the
    /// same as before.
    pub fn insert(&mut self, pod: PendingPod) {
        if self.get(&pod.uid) == Some(&pod) {
            return;
        }
        self.remove(&pod.uid);
        self.last_plan = None;
        self.together += pod.together_with.len();
        let pod = Arc::new(pod);
        let group = pod.is_group().then(Arc::default);
        let turn = FirstTurn { pod: Arc::clone(&pod), class: None, group: group.clone() };
        self.first.insert(PlanOrder::of(&pod), turn);
        self.pods.insert(pod.uid.clone(), Entry { pod, class: None, group });
    }

    /// Removes a pod.
    pub fn remove(&mut self, pod: &PodUid) {
        let Some(Entry { pod, class, .. }) = self.pods.remove(pod) else { return };
        self.last_plan = None;
        self.together -= pod.together_with.len();
        match class {
            None => drop(self.first.remove(&PlanOrder::of(&pod))),
            Some(class) => self.change_queue(class, |queue| queue.remove(&pod)),
        }
    }

    /// Returns the number of pods.
    pub fn len(&self) -> usize {
        self.pods.len()
    }

    /// Returns true if there are no pods.
    pub fn is_empty(&self) -> bool {
        self.pods.is_empty()
    }

    /// Returns a pod.
    pub fn get(&self, pod: &PodUid) -> Option<&PendingPod> {
        self.pods.get(pod).map(|entry| &*entry.pod)
    }

    /// Returns the class in whose queue the pod is; none if each plan tries the pod.
    pub fn class_of(&self, pod: &PodUid) -> Option<ClassId> {
        self.pods.get(pod)?.class
    }

    /// Returns true if a plan has refused the pod like others: its class, or an equal group.
    pub fn is_refused_like_others(&self, pod: &PodUid) -> bool {
        self.class_of(pod).is_some() || self.group(pod).is_some_and(GroupInBacklog::is_refused)
    }

    /// Returns what plans have found of a group.
    pub(crate) fn group(&self, pod: &PodUid) -> Option<&GroupInBacklog> {
        self.pods.get(pod)?.group.as_deref()
    }

    /// Returns the classes of refused pods.
    pub fn classes(&self) -> impl Iterator<Item = RefusedClass<'_>> {
        self.queues.iter().filter_map(|(id, queue)| {
            let last = &queue.last()?.1.uid;
            Some(RefusedClass { id: *id, pods: queue.pods.len(), last })
        })
    }

    /// Returns the number of classes of refused pods.
    pub fn class_count(&self) -> usize {
        self.queues.len()
    }

    /// Returns true if pods of the class were refused.
    pub fn has_class(&self, class: ClassId) -> bool {
        self.queues.contains_key(&class)
    }

    /// Returns the class in whose queue the pod is the last.
    pub fn class_whose_last_is(&self, pod: &PodUid) -> Option<ClassId> {
        let class = self.class_of(pod)?;
        (self.queues.get(&class)?.last()?.1.uid == *pod).then_some(class)
    }

    /// Returns the pods after this one in the order of UIDs, each with the class in whose queue it
    /// is.
    pub fn pods_after(
        &self,
        pod: Option<&PodUid>,
    ) -> impl Iterator<Item = (&PodUid, Option<ClassId>)> {
        let from = pod.map_or(Bound::Unbounded, Bound::Excluded);
        self.pods.range((from, Bound::Unbounded)).map(|(uid, entry)| (uid, entry.class))
    }

    /// Returns the pods with a priority above this one that are next in the order of planning, of
    /// each class the first that is not among the `others`.
    pub fn next_above<'b>(
        &'b self,
        priority: i32,
        others: impl Fn(&PodUid) -> bool + 'b,
    ) -> impl Iterator<Item = &'b PendingPod> {
        let first = self.first.values().take_while(move |turn| turn.pod.priority > priority);
        first.filter_map(move |turn| {
            let queue = turn.class.and_then(|class| self.queue(class));
            let queued = queue.into_iter().flat_map(|queue| queue.pods.values());
            let mut pods = std::iter::once(&turn.pod).chain(queued);
            pods.find(|pod| pod.priority > priority && !others(&pod.uid)).map(|pod| &**pod)
        })
    }

    /// Returns the first pods in the order of planning that are `wanted`, at most this many with
    /// those of their groups.
    pub fn first_in_order(
        &self,
        at_most: usize,
        wanted: impl Fn(&PendingPod) -> bool,
    ) -> Vec<&PendingPod> {
        let key = |pod: &PendingPod| (Reverse(pod.priority), pod.created);
        let wanted = self.pods.values().map(|entry| &*entry.pod).filter(|pod| wanted(pod));
        let mut first: Vec<&PendingPod> = wanted.collect();
        if at_most < first.len() {
            first.select_nth_unstable_by_key(at_most, |pod| key(pod));
            first.truncate(at_most);
        }
        first.sort_by_cached_key(|pod| PlanOrder::of(pod));
        let mut left = at_most;
        first.retain(|pod| {
            let members = pod.members().count();
            let has_room = members <= left;
            left -= if has_room { members } else { 0 };
            has_room
        });
        first
    }

    /// Returns the number of pods that each plan tries first, with those of their groups.
    pub fn turn_count(&self) -> usize {
        self.first.len() + self.together
    }

    /// Returns the pods that each plan tries first.
    pub(crate) fn first_turns(&self) -> btree_map::Iter<'_, PlanOrder, FirstTurn> {
        self.first.iter()
    }

    /// Returns the queue of a class.
    pub(crate) fn queue(&self, class: ClassId) -> Option<&Queue> {
        self.queues.get(&class)
    }

    /// Returns the UIDs of all pods.
    pub(crate) fn uids(&self) -> impl Iterator<Item = &PodUid> {
        self.pods.keys()
    }

    /// Moves a pod that was refused with its class to the queue of the class. If it was the first
    /// of another queue, the class was identified anew, and the whole queue moves. Returns true if
    /// a queue has changed.
    pub(crate) fn refused_with(&mut self, pod: &PodUid, class: ClassId) -> bool {
        let Some(entry) = self.pods.get_mut(pod) else { return false };
        match entry.class.replace(class) {
            Some(old) if old == class => return false,
            None => {
                let pod = Arc::clone(&entry.pod);
                self.first.remove(&PlanOrder::of(&pod));
                self.change_queue(class, |queue| queue.add(pod));
            }
            Some(old) => {
                let mut moved = BTreeMap::new();
                self.change_queue(old, |queue| moved = std::mem::take(&mut queue.pods));
                for pod in moved.values() {
                    if let Some(entry) = self.pods.get_mut(&pod.uid) {
                        entry.class = Some(class);
                    }
                }
                self.change_queue(class, |queue| moved.into_values().for_each(|p| queue.add(p)));
            }
        }
        true
    }

    /// Changes a queue, which has a turn for its first pod. An empty queue is dropped.
    fn change_queue(&mut self, class: ClassId, change: impl FnOnce(&mut Queue)) {
        let queue = self.queues.entry(class).or_default();
        let before = queue.pods.first_key_value().map(|(order, _)| order.clone());
        change(queue);
        let first = queue.pods.first_key_value();
        if first.map(|(order, _)| order) != before.as_ref() {
            before.map(|order| self.first.remove(&order));
            let turn =
                |pod: &Arc<_>| FirstTurn { pod: Arc::clone(pod), class: Some(class), group: None };
            self.first.extend(first.map(|(order, pod)| (order.clone(), turn(pod))));
        }
        if queue.pods.is_empty() {
            self.queues.remove(&class);
        }
    }
}

impl Queue {
    fn add(&mut self, pod: Arc<PendingPod>) {
        self.no_window_before.set(None);
        self.pods.insert(PlanOrder::of(&pod), pod);
    }

    fn remove(&mut self, pod: &PendingPod) {
        self.pods.remove(&PlanOrder::of(pod));
    }

    /// Returns true if the pod is the first.
    pub(crate) fn is_first(&self, pod: &PendingPod) -> bool {
        self.pods.first_key_value().is_some_and(|(_, first)| std::ptr::eq(&**first, pod))
    }

    /// Returns the last pod.
    pub(crate) fn last(&self) -> Option<OrderedPod<'_>> {
        self.pods.last_key_value().map(|(order, pod)| (order, &**pod))
    }

    /// Returns the pods after this one, in order.
    pub(crate) fn after(&self, pod: &PlanOrder) -> impl Iterator<Item = OrderedPod<'_>> {
        let after = self.pods.range((Bound::Excluded(pod), Bound::Unbounded));
        after.map(|(order, pod)| (order, &**pod))
    }
}
