//! Properties of a device that an expression reads.
//!
//! Two devices with equal properties have equal results, so each result is computed once. Tens of
//! thousands of GPUs have a handful of product names.

use std::collections::{BTreeMap, BTreeSet};

use super::code::{Code, Fold};
use super::value::Value;

/// A property of a device that an expression reads.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Read {
    /// Driver name.
    Driver,
    /// Capacities, or `allowMultipleAllocations`.
    Profile,
    /// Value or absence of the attribute with this fully qualified name.
    Attribute(String),
    /// Presence of an attribute in this domain.
    Domain(String),
}

/// All properties that an expression reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Exactly these.
    These(BTreeSet<Read>),
    /// Unknown: the expression iterates over attributes or computes their names.
    Everything,
}

impl Reads {
    /// Determines what `code` reads.
    pub(super) fn of(code: &Code) -> Self {
        let mut finder = Finder::default();
        finder.code(code);
        if finder.everything { Self::Everything } else { Self::These(finder.reads) }
    }
}

/// Part of the device that an expression denotes, if it can be narrowed further.
#[derive(Clone)]
enum DevicePart {
    Device,
    Attributes,
    Domain(String),
    Other,
}

#[derive(Default)]
struct Finder {
    reads: BTreeSet<Read>,
    everything: bool,
    /// Values of `cel.bind` variables, by index.
    bound: BTreeMap<usize, DevicePart>,
}

impl Finder {
    /// Records the reads of an expression whose value is used as it is.
    fn code(&mut self, code: &Code) {
        match self.part(code) {
            DevicePart::Other => {}
            DevicePart::Device | DevicePart::Attributes | DevicePart::Domain(_) => {
                self.everything = true
            }
        }
    }

    /// Returns the part of the device that an expression denotes, and records what it reads.
    fn part(&mut self, code: &Code) -> DevicePart {
        match code {
            Code::Constant(Value::Device) => DevicePart::Device,
            Code::Constant(_) | Code::ConstantList(_) => DevicePart::Other,
            Code::Variable(index) => self.bound.get(index).cloned().unwrap_or(DevicePart::Other),
            Code::Select { of, field, .. } => {
                let of = self.part(of);
                self.narrow(of, field)
            }
            Code::Index { of, key, optional } => {
                let of = self.part(of);
                match (of, key.as_ref()) {
                    // A domain always exists, unless it is accessed as an optional.
                    (DevicePart::Attributes, Code::Constant(Value::String(key))) if *optional => {
                        self.reads.insert(Read::Domain(key.to_string()));
                        DevicePart::Domain(key.to_string())
                    }
                    (of, Code::Constant(Value::String(key))) => self.narrow(of, key),
                    (DevicePart::Other, key) => {
                        self.code(key);
                        DevicePart::Other
                    }
                    _ => self.all(),
                }
            }
            Code::And(operands) | Code::Or(operands) => self.every(operands.iter()),
            Code::Conditional(parts) => self.every(parts.iter()),
            Code::NotStrictlyFalse(of) => self.every([of.as_ref()]),
            Code::OrElse { first, second, .. } => self.every([first.as_ref(), second.as_ref()]),
            Code::Call { function, arguments } => self.call(function.name, arguments),
            Code::List(elements) => self.every(elements.iter().map(|(code, _)| code)),
            Code::Map(entries) => {
                self.every(entries.iter().flat_map(|(key, value, _)| [key, value]))
            }
            Code::Fold(fold) => self.fold(fold),
        }
    }

    fn narrow(&mut self, of: DevicePart, field: &str) -> DevicePart {
        match of {
            DevicePart::Device => match field {
                "attributes" => DevicePart::Attributes,
                "driver" => self.reading(Read::Driver),
                _ => self.reading(Read::Profile),
            },
            DevicePart::Attributes => DevicePart::Domain(field.to_owned()),
            DevicePart::Domain(domain) => {
                self.reading(Read::Attribute(format!("{domain}/{field}")))
            }
            DevicePart::Other => DevicePart::Other,
        }
    }

    fn call(&mut self, function: &str, arguments: &[Code]) -> DevicePart {
        if let ("@in", [Code::Constant(Value::String(key)), container]) = (function, arguments) {
            return match self.part(container) {
                DevicePart::Attributes => self.reading(Read::Domain(key.to_string())),
                DevicePart::Domain(domain) => {
                    self.reading(Read::Attribute(format!("{domain}/{key}")))
                }
                DevicePart::Device => self.all(),
                DevicePart::Other => DevicePart::Other,
            };
        }
        self.every(arguments)
    }

    /// Handles `cel.bind`, a loop over an empty list: its accumulator denotes the initial value.
    fn fold(&mut self, fold: &Fold) -> DevicePart {
        if matches!(&fold.range, Code::List(elements) if elements.is_empty()) {
            let initial = self.part(&fold.initial);
            self.bound.insert(fold.accumulator, initial);
            return self.part(&fold.result);
        }
        self.every([&fold.range, &fold.initial, &fold.condition, &fold.step, &fold.result])
    }

    fn every<'c>(&mut self, codes: impl IntoIterator<Item = &'c Code>) -> DevicePart {
        codes.into_iter().for_each(|code| self.code(code));
        DevicePart::Other
    }

    fn reading(&mut self, read: Read) -> DevicePart {
        self.reads.insert(read);
        DevicePart::Other
    }

    fn all(&mut self) -> DevicePart {
        self.everything = true;
        DevicePart::Other
    }
}

#[cfg(test)]
mod tests {
    use super::super::CompiledSelector;
    use super::*;

    fn reads(expression: &str) -> Reads {
        CompiledSelector::cached(expression).unwrap().reads().clone()
    }

    fn these(reads: &[Read]) -> Reads {
        Reads::These(reads.iter().cloned().collect())
    }

    fn attribute(name: &str) -> Read {
        Read::Attribute(name.to_owned())
    }

    #[test]
    fn fields_accessed_by_name_are_read_individually() {
        let found = reads(
            "device.driver == 'd' && device.attributes['d'].model == 'A' && 'x' in device.attributes['d']",
        );
        assert_eq!(found, these(&[Read::Driver, attribute("d/model"), attribute("d/x")]));
        assert_eq!(reads("has(device.attributes.d.x)"), these(&[attribute("d/x")]));
        assert_eq!(reads("device.attributes['d'].?x.orValue(1) > 0"), these(&[attribute("d/x")]));
        assert_eq!(reads("'d' in device.attributes"), these(&[Read::Domain("d".to_owned())]));
    }

    #[test]
    fn reads_through_cel_bind_are_tracked() {
        let found =
            reads("cel.bind(a, device.attributes['d'], a.model == 'A' && a.?x.orValue(1) == 1)");
        assert_eq!(found, these(&[attribute("d/model"), attribute("d/x")]));
    }

    #[test]
    fn capacity_and_sharing_are_read_as_profile() {
        assert_eq!(
            reads("device.capacity['d'].memory.isGreaterThan(quantity('1Gi'))"),
            these(&[Read::Profile])
        );
        assert_eq!(reads("device.allowMultipleAllocations"), these(&[Read::Profile]));
    }

    #[test]
    fn iteration_over_attributes_reads_everything() {
        assert_eq!(reads("device.attributes['d'].exists(k, k == 'model')"), Reads::Everything);
        assert_eq!(reads("size(device.attributes['d']) == 2"), Reads::Everything);
        assert_eq!(reads("device.attributes['d'][device.driver] == 'x'"), Reads::Everything);
        assert_eq!(
            reads("cel.bind(a, device.attributes, a['d'].exists(k, k == 'm'))"),
            Reads::Everything
        );
        assert_eq!(
            reads("(true ? device.attributes['d'] : device.attributes['e']).x == 1"),
            Reads::Everything
        );
    }
}
