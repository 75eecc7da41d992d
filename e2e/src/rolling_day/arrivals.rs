//! Pods and groups that arrive, with their lifetimes: the mix of `testing/judge/src/day`.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tessera_api::names::{POD_GROUP_ANNOTATION, POD_GROUP_SIZE_ANNOTATION};

use super::DaySize;
use crate::inventory::DRIVER;
use crate::random::Random;

/// PriorityClasses of the pods, with their values.
pub(super) const PRIORITY_CLASSES: [(&str, i32); 3] =
    [("day-low", 0), ("day-middle", 100), ("day-high", 1000)];

/// Memory of shares, in GiB.
const SHARES: [u32; 4] = [10, 16, 24, 32];

/// Numbers of pods of groups, each of which asks for a whole GPU.
const GROUP_SIZES: [u32; 4] = [2, 4, 8, 16];

/// Of 100 arrivals, those that ask for a share and those that ask for one GPU; the others are
/// groups.
const SHARES_OF_100: u64 = 80;
const GPUS_OF_100: u64 = 12;

/// GPUs that an arrival asks for on average.
const MEAN_GPUS: f64 = 0.8 * 20.5 / 80.0 + 0.12 + 0.08 * 7.5;

/// GPUs that all arrivals would use if none waited, as a part of the cluster's.
const LOAD: f64 = 1.03;

/// Part of the nodes that is taken at the begin, in percent.
const TAKEN_PERCENT: u32 = 85;

/// A pod, or a group of equal pods.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    name: String,
    template: String,
    /// Number of pods.
    pub(super) size: u32,
    /// GPUs of each pod.
    pub(super) gpus: f64,
    priority_class: &'static str,
    pub(super) lifetime: Duration,
}

/// The arrivals of a day.
#[derive(Debug)]
pub(super) struct Arrivals {
    random: Random,
    /// Mean lifetime.
    lifetime: Duration,
    gpus_per_node: u32,
    count: u64,
}

impl Arrivals {
    pub(super) fn new(size: DaySize, gpus_per_node: u32) -> Self {
        let gpus = f64::from(size.nodes * gpus_per_node);
        let lifetime = Duration::from_secs_f64(LOAD * gpus / (f64::from(size.rate) * MEAN_GPUS));
        Self { random: Random::new(size.seed), lifetime, gpus_per_node, count: 0 }
    }

    /// Returns pods that take most of the nodes, of which one after the other ends.
    pub(super) fn first(&mut self, nodes: u32) -> Vec<Unit> {
        let count = (nodes * TAKEN_PERCENT / 100).max(1);
        let unit = |number: u32| Unit {
            name: format!("first-{number}"),
            template: "node".to_owned(),
            size: 1,
            gpus: f64::from(self.gpus_per_node),
            priority_class: PRIORITY_CLASSES[number as usize % PRIORITY_CLASSES.len()].0,
            lifetime: self.lifetime * (number + 1) / count,
        };
        (0..count).map(unit).collect()
    }

    /// Returns the next arrival.
    pub(super) fn next(&mut self) -> Unit {
        self.count += 1;
        let kind = self.random.between(0, 99);
        let (template, size, gpus) = if kind < SHARES_OF_100 {
            let memory = *self.random.one_of(&SHARES);
            (share_template(memory), 1, f64::from(memory) / 80.0)
        } else if kind < SHARES_OF_100 + GPUS_OF_100 {
            ("gpu".to_owned(), 1, 1.0)
        } else {
            ("gpu".to_owned(), *self.random.one_of(&GROUP_SIZES), 1.0)
        };
        // From a tenth of the mean to nearly twice as long.
        let percent = u32::try_from(self.random.between(10, 190)).unwrap_or(100);
        Unit {
            name: format!("unit-{}", self.count),
            template,
            size,
            gpus,
            priority_class: self.random.one_of(&PRIORITY_CLASSES).0,
            lifetime: self.lifetime * percent / 100,
        }
    }
}

impl Unit {
    /// Returns the pods with their names.
    pub(super) fn pods(&self, (selector, tolerations): &(Value, Value)) -> Vec<(String, Value)> {
        let annotations = if self.size > 1 {
            json!({POD_GROUP_ANNOTATION: self.name, POD_GROUP_SIZE_ANNOTATION: self.size.to_string()})
        } else {
            json!({})
        };
        let pod = |number: u32| {
            let name = format!("{}-{number}", self.name);
            let object = json!({
                "metadata": {"name": name, "annotations": annotations},
                "spec": {
                    "nodeSelector": selector,
                    "tolerations": tolerations,
                    "priorityClassName": self.priority_class,
                    "terminationGracePeriodSeconds": 30,
                    "containers": [{
                        "name": "never-started",
                        "image": "tessera/none",
                        "resources": {"claims": [{"name": "gpu"}]},
                    }],
                    "resourceClaims": [
                        {"name": "gpu", "resourceClaimTemplateName": self.template},
                    ],
                },
            });
            (name, object)
        };
        (0..self.size).map(pod).collect()
    }
}

fn share_template(memory: u32) -> String {
    format!("share-{memory}")
}

/// Creates the templates of claims: of shares, of a GPU, and of all GPUs of a node.
pub(super) async fn create_templates(
    client: &Client,
    namespace: &str,
    gpus_per_node: u32,
) -> anyhow::Result<()> {
    let shares = SHARES.map(|memory| (share_template(memory), memory, 1));
    let whole = [("gpu".to_owned(), 80, 1), ("node".to_owned(), 80, gpus_per_node)];
    let templates: Api<ResourceClaimTemplate> = Api::namespaced(client.clone(), namespace);
    for (name, memory, count) in shares.into_iter().chain(whole) {
        let capacity = json!({"requests": {"memory": format!("{memory}Gi")}});
        let exactly = json!({"deviceClassName": DRIVER, "count": count, "capacity": capacity});
        let template = json!({
            "metadata": {"name": name},
            "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
        });
        templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(seed: u64) -> Arrivals {
        Arrivals::new(DaySize { nodes: 100, rate: 4, seconds: 60, seed }, 8)
    }

    #[test]
    fn arrivals_ask_for_what_the_lifetime_assumes() {
        let mut arrivals = arrivals(7);
        let gpus = |unit: Unit| f64::from(unit.size) * unit.gpus;
        let sum: f64 = (0..20_000).map(|_| gpus(arrivals.next())).sum();
        let mean = sum / 20_000.0;
        assert!((mean / MEAN_GPUS - 1.0).abs() < 0.05, "{mean} instead of {MEAN_GPUS}");
        // 800 GPUs, of which each arrival has 0.925 for its lifetime.
        let seconds = arrivals.lifetime.as_secs_f64();
        assert!((seconds - 1.03 * 800.0 / (4.0 * MEAN_GPUS)).abs() < 0.1, "{seconds}");
    }

    #[test]
    fn first_pods_end_one_after_the_other() {
        let units = arrivals(1).first(100);
        assert_eq!(units.len(), 85);
        assert!(units.windows(2).all(|pair| pair[0].lifetime < pair[1].lifetime));
        assert_eq!(arrivals(1).first(1).len(), 1);
    }

    #[test]
    fn pods_of_a_group_name_it_and_its_size() {
        let mut arrivals = arrivals(1);
        let mut units = (0..200).map(|_| arrivals.next());
        let group = units.find(|unit| unit.size > 1).unwrap();
        let pods = group.pods(&(json!({}), json!([])));
        assert_eq!(pods.len(), group.size as usize);
        for (_, pod) in pods {
            let annotations = &pod["metadata"]["annotations"];
            assert_eq!(annotations[POD_GROUP_SIZE_ANNOTATION], group.size.to_string());
        }
    }
}
