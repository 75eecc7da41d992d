//! The other writers of the cluster: kube-scheduler, kube-controller-manager, users.

use serde_json::{Value, json};
use tessera_controller::core::event::WatchedKind;

use crate::world::World;

impl World {
    pub(crate) fn claims_of(&self, pod: &str) -> Vec<String> {
        let Some(pod) = self.get(WatchedKind::Pod, pod) else { return Vec::new() };
        let entries = pod["spec"]["resourceClaims"].as_array().unwrap();
        let name = |entry: &Value| entry["resourceClaimName"].as_str().unwrap().to_owned();
        entries.iter().map(name).collect()
    }

    /// Returns the node on which all claims of the pod are allocated.
    fn common_node(&self, pod: &str) -> Option<String> {
        let claims = self.claims_of(pod);
        let places: Option<Vec<String>> = claims.iter().map(|claim| self.place(claim)).collect();
        let nodes = places?;
        let node = |place: &String| place.split('/').next().unwrap().to_owned();
        let first = nodes.first().map(node)?;
        nodes.iter().all(|place| node(place) == first).then_some(first)
    }

    /// Adds a claim for one share, and a pod with it, and binds the pod once it has its devices.
    pub(crate) fn add_bound_pod(&mut self, name: &str, memory: &str) {
        self.add_pod(name, memory);
        self.settle();
        self.bind(name);
        self.settle();
    }

    /// Reserves the claims of an unbound pod and binds it, as kube-scheduler does, if all of them
    /// are allocated on one node.
    pub(crate) fn bind(&mut self, pod: &str) {
        self.reserve(pod);
        self.assign(pod);
    }

    /// Reserves the claims of an unbound pod, as kube-scheduler's PreBind does.
    pub(crate) fn reserve(&mut self, pod: &str) {
        let Some(object) = self.get(WatchedKind::Pod, pod) else { return };
        if self.common_node(pod).is_none() || !object["spec"]["nodeName"].is_null() {
            return;
        }
        let uid = object["metadata"]["uid"].clone();
        for claim in self.claims_of(pod) {
            let consumer = json!({"resource": "pods", "name": pod, "uid": uid});
            self.edit(WatchedKind::Claim, &claim, |claim| {
                let mut reserved =
                    claim["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
                if !reserved.contains(&consumer) {
                    reserved.push(consumer);
                }
                claim["status"]["reservedFor"] = reserved.into();
            });
        }
    }

    /// Binds a pod that has reserved its claims.
    pub(crate) fn assign(&mut self, pod: &str) {
        let Some(node) = self.common_node(pod) else { return };
        let object = self.get(WatchedKind::Pod, pod).unwrap();
        let uid = &object["metadata"]["uid"];
        let is_reserved = |claim: &String| {
            let claim = self.get(WatchedKind::Claim, claim).unwrap();
            let reserved = claim["status"]["reservedFor"].as_array().cloned().unwrap_or_default();
            reserved.iter().any(|consumer| consumer["uid"] == *uid)
        };
        let may_bind = |claim: &String| is_reserved(claim) && self.has_met_conditions(claim);
        if object["spec"]["nodeName"].is_null() && self.claims_of(pod).iter().all(may_bind) {
            self.edit(WatchedKind::Pod, pod, |pod| {
                pod["spec"]["nodeName"] = node.into();
                remove_nomination(pod);
                pod["status"] = json!({"phase": "Running"});
            });
        }
    }

    /// Reports that kube-scheduler cannot place an unbound pod, which removes its nomination.
    pub(crate) fn report_unschedulable(&mut self, pod: &str, message: &str) {
        self.edit(WatchedKind::Pod, pod, |pod| {
            if pod["spec"]["nodeName"].is_null() {
                *pod = objects_unschedulable(pod.clone(), message);
                remove_nomination(pod);
            }
        });
    }

    /// Reports that kube-scheduler evicts pods from the node to make room for an unbound pod. The
    /// same nomination is not written again, so it stays that of its first writer.
    pub(crate) fn preempt(&mut self, pod: &str, node: &str, message: &str) {
        self.edit(WatchedKind::Pod, pod, |pod| {
            if pod["spec"]["nodeName"].is_null() {
                *pod = objects_unschedulable(pod.clone(), message);
                if pod["status"]["nominatedNodeName"] != node {
                    remove_nomination(pod);
                    pod["status"]["nominatedNodeName"] = node.into();
                }
            }
        });
    }

    /// Removes the nomination by kube-scheduler, as its next attempt does.
    pub(crate) fn end_preemption(&mut self, pod: &str) {
        if self.nomination(pod).is_some_and(|(_, is_own)| !is_own) {
            self.edit(WatchedKind::Pod, pod, remove_nomination);
        }
    }

    /// Clears the allocation of a claim that is not reserved, as kube-scheduler's PostFilter does.
    pub(crate) fn clear(&mut self, claim: &str) {
        self.edit(WatchedKind::Claim, claim, |claim| {
            let reserved = claim["status"]["reservedFor"].as_array().map_or(0, Vec::len);
            if reserved == 0 {
                claim["status"] = Value::Null;
            }
        });
    }

    /// Changes a label of a claim.
    pub(crate) fn touch(&mut self, claim: &str) {
        self.edit(WatchedKind::Claim, claim, |_| {});
    }

    /// Deletes a pod that has ended, and deallocates its claims where no other pod has reserved
    /// them, as kube-controller-manager does.
    pub(crate) fn end_pod(&mut self, pod: &str) {
        let claims = self.claims_of(pod);
        let Some(object) = self.get(WatchedKind::Pod, pod) else { return };
        let uid = object["metadata"]["uid"].clone();
        self.delete(WatchedKind::Pod, pod);
        for claim in claims {
            self.edit(WatchedKind::Claim, &claim, |claim| {
                let reserved = claim["status"]["reservedFor"].as_array().cloned();
                let mut reserved = reserved.unwrap_or_default();
                let before = reserved.len();
                reserved.retain(|consumer| consumer["uid"] != uid);
                if reserved.is_empty() && before > 0 {
                    claim["status"] = Value::Null;
                } else if before > 0 {
                    claim["status"]["reservedFor"] = reserved.into();
                }
            });
        }
    }

    /// Deletes a claim that no pod has reserved, and makes another one under its name.
    pub(crate) fn recreate_claim(&mut self, claim: &str, generation: u64) {
        let Some(mut object) = self.get(WatchedKind::Claim, claim) else { return };
        if object["status"]["reservedFor"].as_array().is_some_and(|r| !r.is_empty()) {
            return;
        }
        self.delete(WatchedKind::Claim, claim);
        object["metadata"]["uid"] = format!("uid-{claim}-{generation}").into();
        object["metadata"]["finalizers"] = Value::Null;
        object["status"] = Value::Null;
        self.put(WatchedKind::Claim, object);
    }
}

fn remove_nomination(pod: &mut Value) {
    pod["metadata"].as_object_mut().unwrap().remove("managedFields");
    if let Some(status) = pod["status"].as_object_mut() {
        status.remove("nominatedNodeName");
    }
}

fn objects_unschedulable(pod: Value, message: &str) -> Value {
    crate::objects::unschedulable(pod, message)
}
