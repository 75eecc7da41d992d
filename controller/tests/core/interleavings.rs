//! Random interleavings of other writers, late answers and lost changes.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_api::events;
use tessera_controller::core::effect::Notice;
use tessera_controller::core::event::{
    EvictionOutcome, NominationOutcome, QuotaStatusOutcome, WatchedKind,
};
use tessera_controller::core::{RecoveryPolicy, RecoverySettings};

use crate::resizes::DriverAnswer;
use crate::world::World;
use crate::{groups, objects};

/// Claims and pods change most.
const KINDS: [WatchedKind; 10] = [
    WatchedKind::Claim,
    WatchedKind::Pod,
    WatchedKind::Claim,
    WatchedKind::Pod,
    WatchedKind::Node,
    WatchedKind::Slice,
    WatchedKind::Class,
    WatchedKind::TaintRule,
    WatchedKind::Quota,
    WatchedKind::Resize,
];
const MEMORIES: [&str; 4] = ["19Gi", "40Gi", "60Gi", "80Gi"];

/// One thing that happens. Numbers choose among what exists.
#[derive(Debug, Clone)]
enum Happening {
    AddPod(u8),
    AddPodWithTwoClaims(u8, u8),
    AddImportantPod(u8, u8),
    AddGroup(u8, u8),
    EndFailedBarriers,
    EndEvictions(u8, bool),
    SharePod(u8),
    EndPod(u8),
    Bind(u8),
    Reserve(u8),
    Assign(u8),
    Unschedulable(u8, u8),
    Clear(u8),
    Touch(u8),
    Recreate(u8),
    ToggleNode,
    ToggleSlice,
    SetHealth(bool),
    ToggleClass,
    EditClass,
    ToggleTaintRule,
    SetQuota(u8),
    EndQuotaStatus(bool),
    Resize(u8, u8, u8),
    DeleteResize(u8),
    EndResizeStatus(bool),
    SeeResize(u8),
    ApplyResize(u8, u8),
    ReportResize(u8),
    Interrupt,
    Deliver(u8),
    DeliverAgain(u8),
    Relist(u8),
    CarryOut(u8),
    Answer(u8),
    AnswerAgain(u8),
    LoseAnswer(u8),
    Refuse(u8, bool),
    DropField(u8),
    EndNotice(u8, bool),
    EndNomination(u8),
    FailNomination(u8),
    Preempt(u8, bool, u8),
    Pass(u16),
}

fn happening() -> impl Strategy<Value = Happening> {
    use Happening::*;
    prop_oneof![
        3 => any::<u8>().prop_map(AddPod),
        1 => any::<(u8, u8)>().prop_map(|(a, b)| AddPodWithTwoClaims(a, b)),
        3 => any::<(u8, u8)>().prop_map(|(claim, pod)| AddImportantPod(claim, pod)),
        2 => any::<(u8, u8)>().prop_map(|(first, second)| AddGroup(first, second)),
        1 => Just(EndFailedBarriers),
        3 => any::<(u8, bool)>().prop_map(|(pod, is_refused)| EndEvictions(pod, is_refused)),
        1 => any::<u8>().prop_map(SharePod),
        1 => any::<u8>().prop_map(EndPod),
        2 => any::<u8>().prop_map(Bind),
        1 => any::<u8>().prop_map(Reserve),
        1 => any::<u8>().prop_map(Assign),
        2 => any::<(u8, u8)>().prop_map(|(pod, text)| Unschedulable(pod, text)),
        1 => any::<u8>().prop_map(Clear),
        1 => any::<u8>().prop_map(Touch),
        1 => any::<u8>().prop_map(Recreate),
        1 => Just(ToggleNode),
        1 => Just(ToggleSlice),
        2 => any::<bool>().prop_map(SetHealth),
        1 => Just(ToggleClass),
        1 => Just(EditClass),
        1 => Just(ToggleTaintRule),
        2 => any::<u8>().prop_map(SetQuota),
        2 => any::<bool>().prop_map(EndQuotaStatus),
        3 => any::<(u8, u8, u8)>().prop_map(|(claim, memory, cores)| Resize(claim, memory, cores)),
        1 => any::<u8>().prop_map(DeleteResize),
        4 => any::<bool>().prop_map(EndResizeStatus),
        3 => any::<u8>().prop_map(SeeResize),
        3 => any::<(u8, u8)>().prop_map(|(resize, answer)| ApplyResize(resize, answer)),
        3 => any::<u8>().prop_map(ReportResize),
        1 => Just(Interrupt),
        12 => any::<u8>().prop_map(Deliver),
        1 => any::<u8>().prop_map(DeliverAgain),
        1 => any::<u8>().prop_map(Relist),
        5 => any::<u8>().prop_map(CarryOut),
        5 => any::<u8>().prop_map(Answer),
        1 => any::<u8>().prop_map(AnswerAgain),
        1 => any::<u8>().prop_map(LoseAnswer),
        1 => any::<(u8, bool)>().prop_map(|(write, lasts)| Refuse(write, lasts)),
        1 => any::<u8>().prop_map(DropField),
        2 => any::<(u8, bool)>().prop_map(|(notice, is_taken)| EndNotice(notice, is_taken)),
        4 => any::<u8>().prop_map(EndNomination),
        1 => any::<u8>().prop_map(FailNomination),
        1 => any::<(u8, bool, u8)>().prop_map(|(pod, node, text)| Preempt(pod, node, text)),
        4 => (0..4000u16).prop_map(Pass),
    ]
}

fn choose<T: Clone>(of: &[T], which: u8) -> Option<T> {
    of.get(usize::from(which) % of.len().max(1)).cloned()
}

/// The name of a rule that taints one device.
const TAINT_RULE: &str = "rule";

fn taint_rule() -> Value {
    json!({
        "metadata": {"name": TAINT_RULE, "uid": "uid-rule"},
        "spec": {
            "deviceSelector": {"driver": "gpu.tessera.dev", "pool": "node-b", "device": "gpu-0"},
            "taint": {"key": "example.com/broken", "effect": "NoSchedule"},
        },
    })
}

/// The slice of node-a, whose GPU is healthy or not.
fn slice_of_health(is_healthy: bool) -> Value {
    let mut slice = objects::slice("node-a", 1);
    if !is_healthy {
        let taint = json!({"key": "gpu.tessera.dev/unhealthy", "effect": "NoSchedule"});
        slice["spec"]["devices"][0]["taints"].as_array_mut().unwrap().push(taint);
    }
    slice
}

/// A world under random happenings.
struct Storm {
    world: World,
    made: u64,
}

impl Storm {
    fn new() -> Self {
        let mut world = World::new();
        world.add_node("node-a", 1);
        world.add_node("node-b", 2);
        let delay = Duration::from_secs(2);
        world.recover(RecoverySettings { policy: RecoveryPolicy::Always, delay });
        Self { world, made: 0 }
    }

    fn name(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}-{:03}", self.made)
    }

    fn add_claim(&mut self, memory: u8) -> String {
        let name = self.name("claim");
        let memory = choose(&MEMORIES, memory).unwrap();
        self.world.put(WatchedKind::Claim, objects::claim(&name, memory));
        name
    }

    fn add_pod(&mut self, claims: &[&str]) {
        let name = self.name("pod");
        self.world.put(WatchedKind::Pod, objects::pod(&name, claims));
    }

    fn add_group(&mut self, memory: [u8; 2]) {
        let group = self.name("group");
        for (number, memory) in memory.into_iter().enumerate() {
            let name = format!("{group}-{number}");
            let priority = memory / 64;
            let memory = choose(&MEMORIES, memory).unwrap();
            self.world.put(WatchedKind::Claim, objects::claim(&name, memory));
            let pod = groups::of_group(objects::pod(&name, &[&name]), &group, 2);
            self.world.put(WatchedKind::Pod, objects::important(pod, priority));
        }
    }

    fn happen(&mut self, happening: &Happening) {
        use Happening::*;
        let pods = self.world.names(WatchedKind::Pod);
        let claims = self.world.names(WatchedKind::Claim);
        let writes = self.world.open();
        let world = &mut self.world;
        match *happening {
            AddPod(memory) => {
                let claim = self.add_claim(memory);
                self.add_pod(&[&claim]);
            }
            AddPodWithTwoClaims(a, b) => {
                let (a, b) = (self.add_claim(a), self.add_claim(b));
                self.add_pod(&[&a, &b]);
            }
            AddImportantPod(memory, priority) => {
                let (claim, name) = (self.add_claim(memory), self.name("pod"));
                let pod = objects::important(objects::pod(&name, &[&claim]), priority % 4);
                self.world.put(WatchedKind::Pod, pod);
            }
            AddGroup(first, second) => self.add_group([first, second]),
            EndFailedBarriers => world.end_failed(),
            EndEvictions(pod, is_refused) => {
                let names: Vec<String> = world.open_evictions.keys().cloned().collect();
                let outcome = |_: &str| match is_refused {
                    true => EvictionOutcome::Refused { message: "a budget".to_owned() },
                    false => EvictionOutcome::Evicted,
                };
                choose(&names, pod).iter().for_each(|pod| world.end_evictions(pod, outcome));
            }
            SharePod(claim) => {
                if let Some(claim) = choose(&claims, claim) {
                    self.add_pod(&[&claim]);
                }
            }
            EndPod(pod) => choose(&pods, pod).iter().for_each(|pod| world.end_pod(pod)),
            Bind(pod) => choose(&pods, pod).iter().for_each(|pod| world.bind(pod)),
            Reserve(pod) => choose(&pods, pod).iter().for_each(|pod| world.reserve(pod)),
            Assign(pod) => choose(&pods, pod).iter().for_each(|pod| world.assign(pod)),
            Unschedulable(pod, text) => {
                let message = format!("0/2 nodes are available: {text}");
                let pod = choose(&pods, pod);
                pod.iter().for_each(|pod| world.report_unschedulable(pod, &message));
            }
            Clear(claim) => choose(&claims, claim).iter().for_each(|claim| world.clear(claim)),
            Touch(claim) => choose(&claims, claim).iter().for_each(|claim| world.touch(claim)),
            Recreate(claim) => {
                self.made += 1;
                let claim = choose(&claims, claim);
                claim.iter().for_each(|claim| world.recreate_claim(claim, self.made));
            }
            ToggleNode => self.toggle(WatchedKind::Node, objects::node("node-b")),
            ToggleSlice => self.toggle(WatchedKind::Slice, objects::slice("node-b", 2)),
            SetHealth(is_healthy) => world.put(WatchedKind::Slice, slice_of_health(is_healthy)),
            ToggleClass => self.toggle(WatchedKind::Class, objects::class()),
            EditClass => world.edit(WatchedKind::Class, "gpu.tessera.dev", |_| {}),
            ToggleTaintRule => self.toggle(WatchedKind::TaintRule, taint_rule()),
            SetQuota(0..64) => world.delete(WatchedKind::Quota, objects::QUOTA),
            SetQuota(amount) => {
                let memory = format!("{amount}Gi");
                world.put(WatchedKind::Quota, objects::quota(json!({"memory": memory})));
            }
            EndQuotaStatus(true) => world.end_quota_status(QuotaStatusOutcome::Stored),
            EndQuotaStatus(false) => world.end_quota_status(QuotaStatusOutcome::Failed),
            Resize(..) | DeleteResize(_) | EndResizeStatus(_) | SeeResize(_) | ApplyResize(..)
            | ReportResize(_) => self.happen_to_share(happening),
            Interrupt => world.interrupt(),
            Deliver(kind) => world.deliver(choose(&KINDS, kind).unwrap()),
            DeliverAgain(kind) => world.deliver_again(choose(&KINDS, kind).unwrap()),
            Relist(kind) => world.relist(choose(&KINDS, kind).unwrap()),
            CarryOut(id) => choose(&writes, id).iter().for_each(|id| world.carry_out(*id)),
            Answer(id) => choose(&writes, id).iter().for_each(|id| world.answer(*id)),
            AnswerAgain(which) => world.answer_again(usize::from(which)),
            LoseAnswer(id) => choose(&writes, id).iter().for_each(|id| world.lose_answer(*id)),
            Refuse(id, lasts) => choose(&writes, id).iter().for_each(|id| world.refuse(*id, lasts)),
            DropField(id) => {
                let note = "a field was dropped";
                choose(&writes, id).iter().for_each(|id| world.drop_field(*id, note));
            }
            EndNotice(which, is_taken) => {
                let id = choose(&world.open_notices(), which);
                id.iter().for_each(|id| world.report_notice(*id, is_taken));
            }
            EndNomination(pod) => {
                let pod = choose(&world.open_nominations(), pod);
                pod.iter().for_each(|pod| world.end_nomination(pod));
            }
            FailNomination(pod) => {
                let pod = choose(&world.open_nominations(), pod);
                pod.iter().for_each(|pod| world.fail_nomination(pod, NominationOutcome::Failed));
            }
            Preempt(pod, is_first, text) => {
                let message = format!("0/2 nodes are available: {text}");
                let (pod, node) = (choose(&pods, pod), if is_first { "node-a" } else { "node-b" });
                pod.iter().for_each(|pod| world.preempt(pod, node, &message));
            }
            Pass(millis) => world.pass(Duration::from_millis(millis.into())),
        }
    }

    fn happen_to_share(&mut self, happening: &Happening) {
        use Happening::*;
        let claims = self.world.names(WatchedKind::Claim);
        let resizes = self.world.names(WatchedKind::Resize);
        let world = &mut self.world;
        match *happening {
            Resize(claim, memory, cores) => {
                let size = json!({"memory": choose(&MEMORIES, memory), "cores": cores % 101});
                choose(&claims, claim).iter().for_each(|claim| world.resize(claim, size.clone()));
            }
            DeleteResize(resize) => {
                let resize = choose(&resizes, resize);
                resize.iter().for_each(|resize| world.delete(WatchedKind::Resize, resize));
            }
            EndResizeStatus(is_stored) => world.end_resize_status(is_stored),
            SeeResize(resize) => {
                choose(&resizes, resize).iter().for_each(|resize| world.see_resize(resize));
            }
            ApplyResize(resize, answer) => {
                let answer = choose(&DriverAnswer::ALL, answer);
                let resize = choose(&resizes, resize);
                resize.iter().for_each(|resize| world.apply_resize(resize, answer.unwrap()));
            }
            ReportResize(resize) => {
                choose(&resizes, resize).iter().for_each(|resize| world.report_resize(resize));
            }
            _ => {}
        }
    }

    /// Deletes the object, or creates it again.
    fn toggle(&mut self, kind: WatchedKind, object: Value) {
        let name = object["metadata"]["name"].as_str().unwrap();
        if self.world.get(kind, name).is_some() {
            self.world.delete(kind, name);
        } else {
            self.world.put(kind, object);
        }
    }

    /// Lets the cluster come to rest: everything is delivered and answered, kube-scheduler binds
    /// what it can, and time passes.
    fn calm(&mut self) {
        self.world.put(WatchedKind::Node, objects::node("node-b"));
        self.world.put(WatchedKind::Slice, objects::slice("node-a", 1));
        self.world.put(WatchedKind::Slice, objects::slice("node-b", 2));
        self.world.put(WatchedKind::Class, objects::class());
        self.world.delete(WatchedKind::TaintRule, TAINT_RULE);
        for _ in 0..30 {
            self.world.settle();
            self.world.report_all_notices();
            self.world.end_deleted_pods();
            for pod in self.world.names(WatchedKind::Pod) {
                self.world.edit(WatchedKind::Pod, &pod, |pod| {
                    pod["status"].as_object_mut().unwrap().remove("conditions");
                });
                self.world.end_preemption(&pod);
                self.world.bind(&pod);
            }
            self.world.settle();
            // Those that may be bound now.
            for pod in self.world.names(WatchedKind::Pod) {
                self.world.bind(&pod);
            }
            self.world.end_failed();
            self.world.settle();
            self.world.pass(Duration::from_secs(31));
        }
        self.world.settle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// The world checks after every step: no device is allocated beyond its capacity, a reserved
    /// claim is never released, a claim has one open write, and each number is used once.
    #[test]
    fn invariants_hold_in_every_interleaving(
        happenings in prop::collection::vec(happening(), 1..120),
    ) {
        let mut storm = Storm::new();
        for happening in &happenings {
            storm.happen(happening);
        }
        storm.calm();
        let world = &mut storm.world;
        prop_assert!(!world.has_open_writes(), "each write has ended");
        prop_assert_eq!(world.starving(), Vec::<String>::new());
        prop_assert_eq!(world.wrong_quota_status(), None);
        prop_assert!(world.open_evictions.is_empty());
        // Events are withheld for five minutes at most.
        world.pass(Duration::from_secs(310));
        prop_assert_eq!(world.stale_nominations(), Vec::<String>::new());
        let (writes, notices) = (world.writes.len(), world.notices.len());
        let nominations = world.nominations.len();
        world.pass(Duration::from_secs(600));
        prop_assert_eq!(world.nominations.len(), nominations, "a quiet cluster has none");
        prop_assert_eq!(world.writes.len(), writes, "a quiet cluster has no writes");
        prop_assert_eq!(&world.notices[notices..], &[], "a quiet cluster has no events");
    }

    /// A core that was stopped in the middle starts no write and learns how each has ended. It
    /// reports nothing but dropped fields, which such an end shows.
    #[test]
    fn stopped_core_starts_nothing_in_any_interleaving(
        before in prop::collection::vec(happening(), 1..60),
        after in prop::collection::vec(happening(), 1..60),
    ) {
        let mut storm = Storm::new();
        before.iter().for_each(|happening| storm.happen(happening));
        storm.world.stop();
        let (writes, notices) = (storm.world.writes.len(), storm.world.notices.len());
        after.iter().for_each(|happening| storm.happen(happening));
        storm.world.settle();
        storm.world.pass(Duration::from_secs(600));
        prop_assert!(!storm.world.has_open_writes(), "each write has ended");
        prop_assert_eq!(storm.world.writes.len(), writes);
        let is_of_outcome = |one: &Notice| one.reason == events::ALLOCATION_FIELDS_DROPPED;
        prop_assert!(storm.world.notices[notices..].iter().all(is_of_outcome));
    }
}

/// The reasons that a plan renews at its end are those of all texts about a group.
#[test]
fn waiting_groups_are_told_one_text_while_nothing_changes() {
    use Happening::{AddGroup, AddImportantPod, AddPod, AddPodWithTwoClaims, Bind, EndQuotaStatus};
    let mut storm = Storm::new();
    for happening in [
        AddPod(60),
        AddPod(54),
        EndQuotaStatus(false),
        AddPod(110),
        Bind(0),
        AddImportantPod(169, 1),
        AddPodWithTwoClaims(0, 41),
        AddGroup(105, 211),
        AddGroup(43, 13),
        AddPodWithTwoClaims(0, 13),
        AddImportantPod(152, 147),
        AddGroup(4, 70),
        AddGroup(169, 240),
        AddGroup(128, 205),
    ] {
        storm.happen(&happening);
    }
    storm.calm();
    let world = &mut storm.world;
    world.pass(Duration::from_secs(310));
    let told = world.notices.len();
    world.pass(Duration::from_secs(600));
    assert_eq!(&world.notices[told..], &[]);
}
