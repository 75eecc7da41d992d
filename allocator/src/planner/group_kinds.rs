//! Kinds of groups: groups with equal pods are refused alike.
//!
//! Within a pass the capacity only shrinks, so of equal groups the first is tried. The others of a
//! backlog have no refusals of their own: a plan costs the number of kinds, and little for each
//! group.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use tessera_api::names::ClaimUid;

use super::Planner;
use super::classes::ClassId;
use super::pass::{PlanningPass, lacks_capacity};
use super::pod_to_place::PodToPlace;
use super::turns::Turn;
use crate::backlog::Backlog;
use crate::model::{GroupTopology, PendingPod, PodClaim, PodUid};
use crate::outcome::{GroupShortfall, GroupsAlike, Refusal, RefusalCause};
use crate::policy::Policy;

/// The properties of a group that decide whether it fits, in a state of the pass.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct GroupKind {
    classes: Vec<ClassId>,
    topology: Option<Arc<GroupTopology>>,
    policy: Policy,
}

/// The properties of a group in a backlog that its plans have found.
#[derive(Debug, Default)]
pub(crate) struct GroupInBacklog {
    /// Its kind; none if something concerns only this group.
    kind: OnceLock<Option<Arc<GroupKind>>>,
    /// A plan has refused it like another one.
    is_refused: AtomicBool,
}

/// The refusal of a group that was tried.
#[derive(Debug, Clone)]
pub(super) struct RefusedGroup {
    /// Its shortfall, with the name of a pod of the group that was tried.
    shortfall: GroupShortfall,
    /// The place of this pod among the members.
    named: usize,
    /// The causes of this pod if it fits on no node without the others, by the place of the claim
    /// among its pending ones; otherwise empty.
    own: Vec<(usize, Arc<RefusalCause>)>,
}

/// The groups of a kind that a pass has refused.
pub(super) struct RefusedKind {
    pub(super) like: RefusedGroup,
    /// The refusals of the group that was tried.
    tried: Vec<Refusal>,
    /// Number of the groups that were refused like it.
    others: usize,
    /// One of them was not refused before.
    is_news: bool,
}

impl RefusedKind {
    /// Takes over the causes of the claims of the group that was tried.
    fn renew(&mut self, causes: &HashMap<&ClaimUid, &Arc<RefusalCause>>) {
        let mut renewed = HashMap::new();
        for refusal in &mut self.tried {
            if let Some(cause) = causes.get(&refusal.claim) {
                renewed.insert(Arc::as_ptr(&refusal.cause), Arc::clone(cause));
                refusal.cause = Arc::clone(cause);
            }
        }
        for (_, cause) in &mut self.like.own {
            if let Some(renewed) = renewed.get(&Arc::as_ptr(cause)) {
                *cause = Arc::clone(renewed);
            }
        }
    }
}

impl GroupInBacklog {
    /// Returns true if a plan has refused the group like another one.
    pub(crate) fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }
}

impl RefusedGroup {
    /// Returns the refusal of a group. `own` is that of [`RefusedGroup::own`].
    pub(super) fn new(
        group: &PendingPod,
        shortfall: GroupShortfall,
        own: Vec<(usize, Arc<RefusalCause>)>,
    ) -> Self {
        let named = group.members().position(|pod| pod.name == shortfall.first).unwrap_or(0);
        Self { shortfall, named, own }
    }

    /// Returns the shortfall of a group like the one that was tried.
    pub(super) fn shortfall_of(&self, group: &PendingPod) -> GroupShortfall {
        let first = group.members().nth(self.named).unwrap_or(group).name.clone();
        GroupShortfall { first, ..self.shortfall.clone() }
    }

    /// Returns the refusals of a group like the one that was tried. `cause` is that of its pods,
    /// and `undecided` returns the part of a pod that is refused.
    pub(super) fn refusals<'s>(
        &self,
        group: &'s PendingPod,
        cause: &Arc<RefusalCause>,
        undecided: impl Fn(&'s PendingPod) -> PodToPlace<'s>,
    ) -> Vec<Refusal> {
        let mut claims = Vec::new();
        for (place, pod) in group.members().enumerate() {
            let to_place = undecided(pod);
            if place == self.named && !self.own.is_empty() {
                claims.extend(self.own.iter().filter_map(|(at, cause)| {
                    let claim = to_place.pending.get(*at)?.uid.clone();
                    Some(Refusal { pod: pod.uid.clone(), claim, cause: Arc::clone(cause) })
                }));
            } else {
                claims.extend(to_place.refused_for(cause));
            }
        }
        claims
    }

    /// Returns true if both lead to the same refusals.
    fn is_equal(&self, other: &Self) -> bool {
        let fields = |one: &Self| {
            let GroupShortfall { pods, placed, topology, .. } = one.shortfall.clone();
            (pods, placed, topology, one.named, one.own.len())
        };
        let own = self.own.iter().zip(&other.own);
        fields(self) == fields(other)
            && own.into_iter().all(|(a, b)| a.0 == b.0 && Arc::ptr_eq(&a.1, &b.1))
    }
}

impl Planner {
    /// Returns the kind of a group; none if something concerns only this one.
    pub(super) fn kind_of(&mut self, group: &PendingPod, policy: Policy) -> Option<GroupKind> {
        let topology = group.topology.clone();
        let joins_others = topology.as_ref().is_some_and(|topology| !topology.placed.is_empty());
        let is_like_others = |pod: &PendingPod| {
            pod.excluded_nodes.is_empty()
                && pod.nominated_node.is_none()
                && pod.claims.iter().all(|claim| matches!(claim, PodClaim::Pending(_)))
        };
        if joins_others || !group.members().all(is_like_others) {
            return None;
        }
        let classes = group.members().map(|pod| self.class_of_all(pod, policy)).collect();
        Some(GroupKind { classes, topology, policy })
    }

    /// Returns the refusals of a pod of the backlog that the last plan refused like others, with
    /// their reasons; none for other pods, or if the reasons are not kept.
    pub fn refusals_in(&self, backlog: &Backlog, pod: &PodUid) -> Option<Vec<Refusal>> {
        let waiting = backlog.get(pod)?;
        if let Some(class) = backlog.class_of(pod) {
            return self.refusals_of(waiting, class);
        }
        let kind = backlog.group(pod)?.kind.get()?.as_ref()?;
        let like = self.refused_groups.get(kind)?;
        let shortfall = like.shortfall_of(waiting);
        let known = self.group_causes.get(&shortfall).cloned();
        let cause = known.unwrap_or_else(|| Arc::new(RefusalCause::GroupDoesNotFit(shortfall)));
        Some(like.refusals(waiting, &cause, PodToPlace::all_of))
    }
}

impl<'p> PlanningPass<'p> {
    /// Refuses a group like an equal one of this pass. Returns false if it needs a turn.
    pub(super) fn refuse_like_others(&mut self, turn: &Turn<'p>) -> bool {
        let Some(group) = turn.group else { return false };
        let policy = self.settings.policy;
        let kind = group.kind.get_or_init(|| self.planner.kind_of(turn.pod, policy).map(Arc::new));
        let Some(kind) = kind.as_ref().filter(|kind| self.refused_groups.contains_key(*kind))
        else {
            return false;
        };
        if self.open_window(turn.pod).is_some()
            || turn.pod.members().any(|pod| self.is_partly_decided(pod))
        {
            return false;
        }
        let Some(refused) = self.refused_groups.get_mut(kind) else { return false };
        refused.others += 1;
        if !group.is_refused.swap(true, Ordering::Relaxed) {
            refused.is_news = true;
            if refused.tried.iter().any(|refusal| lacks_capacity(&refusal.cause)) {
                self.planner.forecast.count_refusal(&turn.pod.uid);
            }
        }
        true
    }

    /// Notes the refusal of a group that was tried, for others of its kind.
    pub(super) fn note_refused_kind(
        &mut self,
        kind: GroupKind,
        like: RefusedGroup,
        tried: Vec<Refusal>,
    ) {
        let refused = RefusedKind { like, tried, others: 0, is_news: false };
        self.refused_groups.insert(Arc::new(kind), refused);
    }

    /// Ends the pass for groups: returns those that were refused alike, and keeps their reasons,
    /// which are those of `refusals`: some were renewed since. After a partial plan those of the
    /// plan before are kept, too.
    pub(super) fn end_groups(
        &mut self,
        refusals: &[Refusal],
        is_partial: bool,
    ) -> Vec<GroupsAlike> {
        let refused = std::mem::take(&mut self.refused_groups);
        let mut before = std::mem::take(&mut self.planner.refused_groups);
        let causes = if refused.is_empty() { &[] } else { refusals };
        let causes: HashMap<_, _> = causes.iter().map(|one| (&one.claim, &one.cause)).collect();
        let mut alike = Vec::new();
        let mut kept = RefusedGroups::new();
        for (kind, mut refused) in refused {
            refused.renew(&causes);
            let RefusedKind { like, tried, others, mut is_news } = refused;
            is_news |= !before.remove(&kind).is_some_and(|before| before.is_equal(&like));
            alike.extend((others > 0).then_some(GroupsAlike { tried, others, is_news }));
            kept.insert(kind, like);
        }
        if is_partial {
            kept.extend(before);
        }
        self.planner.refused_groups = kept;
        alike
    }
}

/// The groups of each kind that a plan has refused.
pub(super) type RefusedGroups = HashMap<Arc<GroupKind>, RefusedGroup>;
