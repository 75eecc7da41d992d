//! ResourceSlices (resource.k8s.io/v1): limits, names, request policies.

use std::collections::HashSet;

use serde_json::Value;

use super::super::error::FieldError;
use super::super::quantity::{self, Nano};
use super::{claim, names};

const DEVICES: usize = 128;
/// Limit for slices whose devices have taints, counters or list attributes.
const DEVICES_WITH_EXTRAS: usize = 64;
const ATTRIBUTES_AND_CAPACITY: usize = 32;
const TAINTS: usize = 16;
const COUNTER_SETS: usize = 8;
const VALID_VALUES: usize = 10;
const ATTRIBUTE_BYTES: usize = 64;

fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

fn list<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object[field].as_array().map(Vec::as_slice).unwrap_or_default()
}

pub(super) fn spec(spec: &Value, errors: &mut Vec<FieldError>) {
    names::driver("spec.driver", text(spec, "driver"), errors);
    claim::pool_name("spec.pool.name", text(&spec["pool"], "name"), errors);
    if spec["pool"]["resourceSliceCount"].as_i64().unwrap_or(0) < 1 {
        let count = spec["pool"]["resourceSliceCount"].clone();
        errors.push(FieldError::invalid(
            "spec.pool.resourceSliceCount",
            count,
            "must be greater than zero",
        ));
    }
    if spec["pool"]["generation"].as_i64().unwrap_or(0) < 0 {
        let generation = spec["pool"]["generation"].clone();
        errors.push(FieldError::invalid(
            "spec.pool.generation",
            generation,
            "must be greater than or equal to zero",
        ));
    }
    node_choice(spec, errors);
    let devices = list(spec, "devices");
    let most = if devices.iter().any(has_extras) { DEVICES_WITH_EXTRAS } else { DEVICES };
    if devices.len() > most {
        errors.push(FieldError::too_many("spec.devices", devices.len(), most));
    }
    let counter_sets = list(spec, "sharedCounters");
    if counter_sets.len() > COUNTER_SETS {
        errors.push(FieldError::too_many("spec.sharedCounters", counter_sets.len(), COUNTER_SETS));
    }
    if !devices.is_empty() && !counter_sets.is_empty() {
        errors.push(FieldError::invalid(
            "spec",
            "",
            "only one of `sharedCounters` or `devices` is allowed",
        ));
    }
    let mut seen = HashSet::new();
    for (index, device) in devices.iter().enumerate() {
        let at = format!("spec.devices[{index}]");
        let name = text(device, "name");
        names::label(&format!("{at}.name"), name, errors);
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(at.clone(), name));
        }
        self::device(device, &at, errors);
    }
}

/// Driver, pool and node of a slice are immutable.
pub(super) fn spec_update(new: &Value, old: &Value, errors: &mut Vec<FieldError>) {
    let mut fixed = |field: &str, new: &Value, old: &Value| {
        if new != old {
            errors.push(FieldError::invalid(field, new.clone(), "field is immutable"));
        }
    };
    fixed("spec.driver", &new["driver"], &old["driver"]);
    fixed("spec.pool.name", &new["pool"]["name"], &old["pool"]["name"]);
    fixed("spec.nodeName", &new["nodeName"], &old["nodeName"]);
}

fn has_extras(device: &Value) -> bool {
    let list_attribute = |attribute: &Value| {
        ["ints", "bools", "strings", "versions"].iter().any(|f| attribute[f].is_array())
    };
    !list(device, "taints").is_empty()
        || !list(device, "consumesCounters").is_empty()
        || device["attributes"]
            .as_object()
            .into_iter()
            .flatten()
            .any(|(_, value)| list_attribute(value))
}

fn node_choice(spec: &Value, errors: &mut Vec<FieldError>) {
    let chosen = [
        !text(spec, "nodeName").is_empty(),
        spec["nodeSelector"].is_object(),
        spec["allNodes"] == true,
        spec["perDeviceNodeSelection"] == true,
    ];
    let rule = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    match chosen.iter().filter(|chosen| **chosen).count() {
        0 => errors.push(FieldError::required("spec", rule)),
        1 => {}
        _ => errors.push(FieldError::invalid(
            "spec",
            "",
            format!("{rule}, but multiple fields are set"),
        )),
    }
}

fn device(device: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let attributes = device["attributes"].as_object();
    let capacity = device["capacity"].as_object();
    let total = attributes.map_or(0, |map| map.len()) + capacity.map_or(0, |map| map.len());
    if total > ATTRIBUTES_AND_CAPACITY {
        let rule = format!(
            "the total number of attributes and capacities must not exceed {ATTRIBUTES_AND_CAPACITY}"
        );
        errors.push(FieldError::invalid(at, total, rule));
    }
    for (name, attribute) in attributes.into_iter().flatten() {
        qualified_name(&format!("{at}.attributes"), name, errors);
        self::attribute(attribute, &format!("{at}.attributes[{name}]"), errors);
    }
    let shared = device["allowMultipleAllocations"] == true;
    for (name, amount) in capacity.into_iter().flatten() {
        qualified_name(&format!("{at}.capacity"), name, errors);
        self::capacity(amount, shared, &format!("{at}.capacity[{name}]"), errors);
    }
    let taints = list(device, "taints");
    if taints.len() > TAINTS {
        errors.push(FieldError::too_many(format!("{at}.taints"), taints.len(), TAINTS));
    }
    for (index, taint) in taints.iter().enumerate() {
        names::qualified(&format!("{at}.taints[{index}].key"), text(taint, "key"), errors);
        let effect = text(taint, "effect");
        if !["None", "NoSchedule", "NoExecute"].contains(&effect) {
            let at = format!("{at}.taints[{index}].effect");
            errors.push(FieldError::not_supported(
                at,
                effect,
                &["NoExecute", "NoSchedule", "None"],
            ));
        }
    }
}

/// Checks `[domain/]C_identifier`, with at most 32 characters in the identifier.
fn qualified_name(at: &str, name: &str, errors: &mut Vec<FieldError>) {
    let (domain, id) = match name.split_once('/') {
        Some((domain, id)) => (Some(domain), id),
        None => (None, name),
    };
    if let Some(domain) = domain {
        names::driver(at, domain, errors);
    }
    let identifier = |id: &str| {
        id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !id.starts_with(|c: char| c.is_ascii_digit())
    };
    if id.is_empty() {
        errors.push(FieldError::required(at, "name must not be empty"));
    } else if id.len() > 32 {
        errors.push(FieldError::too_long(at, 32));
    } else if !identifier(id) {
        let rule = "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')";
        errors.push(FieldError::invalid(at, id, rule));
    }
}

fn attribute(attribute: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let set = attribute.as_object().map_or(0, |map| map.len());
    if set != 1 {
        errors.push(FieldError::invalid(
            at,
            attribute.clone(),
            "exactly one value must be specified",
        ));
    }
    for field in ["string", "version"] {
        if text(attribute, field).len() > ATTRIBUTE_BYTES {
            errors.push(FieldError::too_long(format!("{at}.{field}"), ATTRIBUTE_BYTES));
        }
    }
    if let Some(version) = attribute["version"].as_str()
        && !is_semver(version)
    {
        let rule = "must be a string compatible with semver.org spec 2.0.0";
        errors.push(FieldError::invalid(format!("{at}.version"), version, rule));
    }
}

/// Returns true for a semantic version 2.0.0 by the exact grammar: no leading zeros, no `v`.
fn is_semver(text: &str) -> bool {
    let (text, build) =
        text.split_once('+').map_or((text, None), |(text, build)| (text, Some(build)));
    let (core, pre) = text.split_once('-').map_or((text, None), |(core, pre)| (core, Some(pre)));
    let number = |part: &str| {
        !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    let identifier = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let numeric_ok = |part: &str| !part.bytes().all(|b| b.is_ascii_digit()) || number(part);
    core.split('.').count() == 3
        && core.split('.').all(number)
        && pre.is_none_or(|pre| pre.split('.').all(|part| identifier(part) && numeric_ok(part)))
        && build.is_none_or(|build| build.split('.').all(identifier))
}

fn capacity(capacity: &Value, shared: bool, at: &str, errors: &mut Vec<FieldError>) {
    let policy = &capacity["requestPolicy"];
    if policy.is_null() {
        return;
    }
    let at = format!("{at}.requestPolicy");
    if !shared {
        errors.push(FieldError::forbidden(at, "allowMultipleAllocations must be true"));
        return;
    }
    let Some(value) = Amount::parse(&capacity["value"]) else { return };
    PolicyCheck { policy, value, at: &at, errors }.check();
}

/// A quantity with its text, for messages.
#[derive(Clone, Debug)]
struct Amount {
    nano: Nano,
    text: String,
}

impl Amount {
    /// Parses an amount. Invalid quantities were refused by the decoder.
    fn parse(value: &Value) -> Option<Self> {
        let text = value.as_str()?;
        Some(Self { nano: quantity::parse(text)?, text: text.to_owned() })
    }
}

/// Checks the request policy of one capacity.
struct PolicyCheck<'a> {
    policy: &'a Value,
    value: Amount,
    at: &'a str,
    errors: &'a mut Vec<FieldError>,
}

impl PolicyCheck<'_> {
    fn check(&mut self) {
        let values = !list(self.policy, "validValues").is_empty();
        let range = self.policy["validRange"].is_object();
        let which = match (values, range) {
            (true, true) => {
                let rule = "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
                self.errors.push(FieldError::forbidden(self.at, rule));
                return;
            }
            (true, false) => "validValues",
            (false, true) => "validRange",
            (false, false) => return,
        };
        let Some(default) = Amount::parse(&self.policy["default"]) else {
            let rule = format!("required when {which} is defined");
            self.errors.push(FieldError::required(format!("{}.default", self.at), rule));
            return;
        };
        if values {
            self.values(&default);
        } else {
            self.range(&default);
        }
    }

    fn wrong(&mut self, field: &str, amount: &Amount, rule: impl Into<String>) {
        self.errors.push(FieldError::invalid(
            format!("{}.{field}", self.at),
            amount.text.clone(),
            rule,
        ));
    }

    fn values(&mut self, default: &Amount) {
        let listed: Vec<Amount> =
            list(self.policy, "validValues").iter().filter_map(Amount::parse).collect();
        if listed.len() > VALID_VALUES {
            self.errors.push(FieldError::too_many(
                format!("{}.validValues", self.at),
                listed.len(),
                VALID_VALUES,
            ));
            return;
        }
        for (index, amount) in listed.iter().enumerate() {
            let field = format!("validValues[{index}]");
            if index > 0 && listed[index - 1].nano > amount.nano {
                self.wrong(&field, amount, "values must be sorted in ascending order");
            }
            if amount.nano > self.value.nano {
                let rule = format!("option is larger than capacity value: {}", self.value.text);
                self.wrong(&field, amount, rule);
            }
        }
        if listed.iter().all(|amount| amount.nano != default.nano) {
            self.wrong(
                "validValues",
                default,
                "default value is not valid according to the requestPolicy",
            );
        }
    }

    fn range(&mut self, default: &Amount) {
        let range = self.policy["validRange"].clone();
        let Some(min) = Amount::parse(&range["min"]) else {
            let at = format!("{}.validRange.min", self.at);
            self.errors.push(FieldError::required(at, "required when validRange is defined"));
            return;
        };
        let value = self.value.clone();
        if min.nano > value.nano {
            self.wrong(
                "validRange.min",
                &min,
                format!("min is larger than capacity value: {}", value.text),
            );
        }
        if default.nano < min.nano {
            self.wrong(
                "validRange.default",
                default,
                format!("default is less than min: {}", min.text),
            );
        }
        let max = Amount::parse(&range["max"]);
        if let Some(max) = &max {
            if min.nano > max.nano {
                self.wrong("validRange.max", &min, format!("min is larger than max: {}", max.text));
            }
            if max.nano > value.nano {
                self.wrong(
                    "validRange.max",
                    max,
                    format!("max is larger than capacity value: {}", value.text),
                );
            }
            if default.nano > max.nano {
                self.wrong(
                    "validRange.default",
                    default,
                    format!("default is more than max: {}", max.text),
                );
            }
        }
        if let Some(step) = Amount::parse(&range["step"]) {
            self.step(default, &min, max.as_ref(), &step);
        }
    }

    /// Default and max must be multiples of the step, counted from min. A default above the
    /// capacity is accepted, as upstream.
    fn step(&mut self, default: &Amount, min: &Amount, max: Option<&Amount>, step: &Amount) {
        let field = "validRange.step";
        if step.nano.0 <= 0 {
            self.wrong(field, step, "must be greater than zero");
            return;
        }
        if min.nano.0 + step.nano.0 > self.value.nano.0 {
            let rule = format!("one step is larger than capacity value: {}", self.value.text);
            self.wrong(field, step, rule);
        }
        for amount in std::iter::once(default).chain(max) {
            if (amount.nano.0 - min.nano.0) % step.nano.0 != 0 {
                let rule = format!(
                    "value is not a multiple of a given step ({}) from ({})",
                    step.text, min.text
                );
                self.wrong(field, amount, rule);
            }
        }
    }
}
