//! Claim templates of converted pods.

use std::time::Duration;

use serde_json::{Value, json};
use tessera_controller::core::effect::TemplateChange;
use tessera_controller::core::event::{TemplateOutcome, WatchedKind};
use tessera_dialect::{Converter, Dialect, Settings, Verdict};

use crate::world::World;

const TEMPLATE: WatchedKind = WatchedKind::Template;
const GRACE: Duration = Duration::from_secs(600);

fn converter() -> Converter {
    Converter::new(Settings::with_defaults(&[Dialect::Hami])).unwrap()
}

fn world() -> World {
    let mut world = World::new();
    world.new_leader(Some(converter()));
    world
}

/// Returns a pod of HAMi as the webhook stores it, and the name of its template.
fn converted(name: &str, mib: u32) -> (Value, String) {
    let limits = json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": mib.to_string()});
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {"schedulerName": "default-scheduler", "containers": [
            {"name": "c", "image": "i", "resources": {"limits": limits}},
        ]},
        "status": {"phase": "Pending"},
    });
    let Verdict::Convert(conversion) = converter().admit(&pod, "default", Dialect::Hami).unwrap()
    else {
        panic!("it is converted")
    };
    json_patch::patch(&mut pod, &conversion.patch.0).unwrap();
    (pod, conversion.template.unwrap().name)
}

fn add(world: &mut World, pod: Value) {
    world.put(WatchedKind::Pod, pod);
    world.deliver_all();
}

/// Returns the names of the templates that are being written.
fn open(world: &World) -> Vec<String> {
    world.open_templates.keys().map(|template| template.name.clone()).collect()
}

fn texts(world: &World) -> Vec<String> {
    let notices = world.notices.iter().filter(|n| n.reason.name() == "ClaimTemplateNotCreated");
    notices.map(|notice| notice.note.clone()).collect()
}

#[test]
fn a_template_is_created_once_for_all_pods_of_its_shape() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    assert_eq!(open(&world), [name.as_str()]);
    add(&mut world, converted("b", 3000).0);
    assert_eq!(open(&world), [name.as_str()], "one write at a time");
    assert!(matches!(world.write_template(&name), TemplateOutcome::Created(_)));
    add(&mut world, converted("c", 3000).0);
    world.deliver_all();
    assert_eq!(open(&world), [""; 0]);
    let spec = &world.get(TEMPLATE, &name).unwrap()["spec"];
    let request = &spec["spec"]["devices"]["requests"][0];
    assert_eq!(request["exactly"]["capacity"]["requests"]["memory"], "3000Mi");
    add(&mut world, converted("d", 4000).0);
    assert_eq!(open(&world).len(), 1, "another shape");
}

#[test]
fn a_template_is_deleted_a_time_after_its_last_pod() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    add(&mut world, converted("b", 3000).0);
    world.write_template(&name);
    world.deliver_all();
    world.delete(WatchedKind::Pod, "a");
    world.deliver_all();
    world.pass(2 * GRACE);
    assert_eq!(open(&world), [""; 0], "b names it");
    world.edit(WatchedKind::Pod, "b", |pod| pod["status"]["phase"] = "Succeeded".into());
    world.deliver_all();
    world.pass(GRACE - Duration::from_secs(1));
    assert_eq!(open(&world), [""; 0], "a Job may create the next");
    add(&mut world, converted("c", 3000).0);
    world.pass(Duration::from_secs(2));
    assert_eq!(open(&world), [""; 0], "c names it again");
    world.delete(WatchedKind::Pod, "c");
    world.deliver_all();
    world.pass(GRACE + Duration::from_secs(1));
    assert!(matches!(world.write_template(&name), TemplateOutcome::Gone));
    world.deliver_all();
    assert_eq!(world.get(TEMPLATE, &name), None);
    world.pass(2 * GRACE);
    assert_eq!(open(&world), [""; 0]);
}

#[test]
fn a_template_with_another_content_is_replaced() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    let squat = json!({"spec": {"devices": {"requests": [
        {"name": "c", "exactly": {"deviceClassName": "gpu.tessera.dev", "adminAccess": true}},
    ]}}});
    world.put(TEMPLATE, crate::objects::template(&name, "squatted", squat));
    world.deliver_all();
    add(&mut world, pod);
    let (_, change) = world.open_templates.iter().next().unwrap();
    assert!(matches!(change, TemplateChange::Delete(uid) if uid == "squatted"));
    world.write_template(&name);
    world.write_template(&name);
    world.deliver_all();
    assert_eq!(open(&world), [""; 0]);
    let spec = &world.get(TEMPLATE, &name).unwrap()["spec"];
    assert_eq!(spec["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"], Value::Null);
}

#[test]
fn a_template_of_the_last_leader_is_not_replaced() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    world.write_template(&name);
    world.new_leader(Some(converter()));
    assert_eq!(open(&world), [""; 0], "the defaults of the API server are no other content");
}

#[test]
fn a_template_that_the_api_server_changes_is_not_replaced_for_ever() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    world.write_template(&name);
    // A field that this version does not know the default of.
    world.edit(TEMPLATE, &name, |template| {
        template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["adminAccess"] = false.into();
    });
    world.deliver_all();
    assert_eq!(open(&world), [""; 0]);
}

#[test]
fn a_template_that_a_user_deletes_is_created_again() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    world.write_template(&name);
    world.deliver_all();
    world.delete(TEMPLATE, &name);
    world.deliver_all();
    assert!(matches!(world.write_template(&name), TemplateOutcome::Created(_)));
}

#[test]
fn a_failed_write_is_repeated_at_growing_intervals() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    let mut attempts = 1;
    for _ in 0..600 {
        if !world.open_templates.is_empty() {
            world.end_template(&name, TemplateOutcome::Failed);
            attempts += 1;
        }
        world.pass(Duration::from_secs(1));
    }
    assert!((10..=20).contains(&attempts), "attempts in 10 minutes: {attempts}");
    assert_eq!(texts(&world), [""; 0], "an API server that is away is no fault of the pod");
    world.pass(Duration::from_secs(61));
    assert!(matches!(world.write_template(&name), TemplateOutcome::Created(_)));
}

#[test]
fn a_refusal_of_the_api_server_is_told_to_the_pod() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    let message = "exceeded quota".to_owned();
    world.end_template(&name, TemplateOutcome::Refused { message });
    let [text] = &texts(&world)[..] else { panic!("{:?}", texts(&world)) };
    assert_eq!(
        *text,
        format!("the API server refuses ResourceClaimTemplate {name}: exceeded quota")
    );
    world.pass(Duration::from_secs(1));
    assert!(matches!(world.write_template(&name), TemplateOutcome::Created(_)));
}

#[test]
fn a_pod_that_names_a_template_by_hand_gets_none() {
    let mut world = world();
    let (mut pod, name) = converted("a", 3000);
    pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = "tessera.hami.00".into();
    add(&mut world, pod);
    let (mut bare, _) = converted("b", 3000);
    bare["metadata"]["annotations"] = Value::Null;
    add(&mut world, bare);
    assert_eq!(open(&world), [""; 0]);
    let texts = texts(&world);
    let is_told = |part: &str| texts.iter().any(|text| text.contains(part));
    assert!(is_told(&format!("gives ResourceClaimTemplate {name}")), "{texts:?}");
    assert!(is_told("the pod has no annotation gpu.tessera.dev/converted"), "{texts:?}");
}

#[test]
fn a_new_leader_creates_and_deletes_what_the_last_one_left() {
    let mut world = world();
    let (pod, name) = converted("a", 3000);
    add(&mut world, pod);
    world.new_leader(Some(converter()));
    assert_eq!(open(&world), [name.as_str()], "the last one had not written it");
    world.write_template(&name);
    world.new_leader(Some(converter()));
    assert_eq!(open(&world), [""; 0]);
    world.delete(WatchedKind::Pod, "a");
    world.deliver_all();
    world.new_leader(None);
    world.pass(GRACE + Duration::from_secs(1));
    assert_eq!(open(&world), [name.as_str()], "also without settings of dialects");
}

#[test]
fn a_leader_without_settings_tells_what_to_do() {
    let mut world = world();
    world.new_leader(None);
    add(&mut world, converted("a", 3000).0);
    assert_eq!(open(&world), [""; 0]);
    let texts = texts(&world);
    assert!(texts[0].contains("set the chart's `dialects`"), "{texts:?}");
}

#[test]
fn templates_of_users_are_left_alone() {
    let mut world = world();
    let spec = json!({"spec": {"devices": {"requests": []}}});
    world.put(TEMPLATE, crate::objects::template("quarter", "own", spec));
    world.deliver_all();
    world.pass(2 * GRACE);
    world.delete(TEMPLATE, "quarter");
    world.deliver_all();
    assert_eq!(open(&world), [""; 0]);
}
