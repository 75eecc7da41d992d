//! Parameters of a namespace for requests that leave fields open.

use super::{Compute, GpuConfig, Memory, Placement, RequestedCapacity, Sharing};

impl GpuConfig {
    /// Returns the fields of `defaults` that complete these parameters of a request: those that are
    /// not set, and that contradict neither the others nor the capacity that the request names. So
    /// a default never makes a claim invalid. Only a request for one GPU, the only one of its
    /// claim, is completed by `sharing: MPS`.
    #[must_use]
    pub fn completion(
        &self,
        defaults: &Self,
        requested: RequestedCapacity,
        is_one_gpu: bool,
    ) -> Self {
        let mut completion = Self::default();
        for part in defaults.parts() {
            let candidate = completion.overridden_by(&part);
            let whole = candidate.overridden_by(self);
            let is_new = whole != completion.overridden_by(self);
            let is_valid = whole.effective().is_ok()
                && whole.check_request(requested).is_ok()
                && (is_one_gpu || part.sharing != Some(Sharing::Mps));
            if is_new && is_valid {
                completion = candidate;
            }
        }
        completion
    }

    /// Returns parameters with one field each, of which these are made.
    fn parts(&self) -> Vec<Self> {
        let Self { placement, topology, exclusive, memory, compute, sharing } = self;
        let none = Self::default;
        let of_placement = |placement| Self { placement, ..none() };
        let of_memory = |memory| Self { memory, ..none() };
        let of_compute = |compute| Self { compute, ..none() };
        let parts = vec![
            of_placement(Placement { node: placement.node, ..Placement::default() }),
            of_placement(Placement { device: placement.device, ..Placement::default() }),
            Self { topology: topology.clone(), ..none() },
            Self { exclusive: *exclusive, ..none() },
            of_memory(Memory { percent: memory.percent, ..Memory::default() }),
            of_memory(Memory { limit: memory.limit, ..Memory::default() }),
            of_memory(Memory { oversubscribe: memory.oversubscribe, ..Memory::default() }),
            // The mechanism decides which of the others are possible.
            Self { sharing: *sharing, ..none() },
            of_compute(Compute { policy: compute.policy, ..Compute::default() }),
            of_compute(Compute { priority: compute.priority, ..Compute::default() }),
            of_compute(Compute { limit: compute.limit, ..Compute::default() }),
        ];
        parts.into_iter().filter(|part| *part != none()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::quantity::Quantity;

    fn config(fields: Value) -> GpuConfig {
        let mut fields = fields;
        fields["apiVersion"] = "gpu.tessera.dev/v1alpha1".into();
        fields["kind"] = "GpuConfig".into();
        GpuConfig::decode(&fields).unwrap()
    }

    fn completion(own: Value, defaults: Value, requested: RequestedCapacity) -> GpuConfig {
        config(own).completion(&config(defaults), requested, true)
    }

    #[test]
    fn every_field_is_a_part() {
        let all = config(json!({
            "placement": {"node": "Spread", "device": "Binpack"},
            "topology": [{"scope": "NVLink", "mode": "Prefer"}], "exclusive": true, "sharing": "Intercept",
            "memory": {"limit": "1Gi", "oversubscribe": true},
            "compute": {"policy": "Balance", "priority": "High", "limit": 50},
        }));
        let all = GpuConfig { memory: Memory { percent: "25".parse().ok(), ..all.memory }, ..all };
        let merged = all.parts().iter().fold(GpuConfig::default(), |sum, p| sum.overridden_by(p));
        assert_eq!(merged, all);
    }

    #[test]
    fn fields_that_are_set_are_kept() {
        let own = json!({"compute": {"policy": "Fixed"}, "placement": {"node": "Spread"}});
        let defaults = json!({
            "compute": {"policy": "Balance", "priority": "Low"},
            "placement": {"node": "Binpack", "device": "Binpack"},
        });
        let expected =
            config(json!({"compute": {"priority": "Low"}, "placement": {"device": "Binpack"}}));
        assert_eq!(completion(own, defaults, RequestedCapacity::default()), expected);
    }

    #[test]
    fn a_default_never_contradicts_the_claim() {
        let memory = RequestedCapacity {
            memory: Some(Quantity::from_mib(1024)),
            ..RequestedCapacity::default()
        };
        let percent = || json!({"memory": {"percent": 25}, "compute": {"priority": "Low"}});
        let low = config(json!({"compute": {"priority": "Low"}}));
        assert_eq!(completion(json!({}), percent(), memory), low);
        assert_eq!(
            completion(json!({"exclusive": true}), percent(), RequestedCapacity::default()),
            low
        );
        let limit = json!({"compute": {"limit": 50}});
        let fixed = json!({"compute": {"policy": "Fixed"}});
        let nothing = GpuConfig::default();
        assert_eq!(completion(fixed, limit, RequestedCapacity::default()), nothing);
        let mps = json!({"sharing": "MPS"});
        let high = json!({"compute": {"priority": "High"}});
        assert_eq!(completion(high, mps.clone(), RequestedCapacity::default()), nothing);
        let several =
            config(json!({})).completion(&config(mps), RequestedCapacity::default(), false);
        assert_eq!(several, nothing);
    }
}
