//! What of a device an expression reads.
//!
//! Two devices that agree in all of it get the same answer, so the answer is worked out once. Forty
//! thousand GPUs have a handful of product names.

use std::collections::{BTreeMap, BTreeSet};

use super::code::{Code, Fold};
use super::value::Value;

/// One thing that an expression reads of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Read {
    /// The driver's name.
    Driver,
    /// Capacities, or whether it can be shared.
    Offer,
    /// The attribute of this fully qualified name, or that it is not there.
    Attribute(String),
    /// Whether there is any attribute of this domain.
    Domain(String),
}

/// All that an expression reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Nothing but these.
    These(BTreeSet<Read>),
    /// It cannot be told: it goes over attributes, or computes their names.
    Everything,
}

impl Reads {
    /// Finds out what `code` reads.
    pub(super) fn of(code: &Code) -> Self {
        let mut finder = Finder::default();
        finder.code(code);
        if finder.everything { Self::Everything } else { Self::These(finder.reads) }
    }
}

/// What an expression stands for, where it is a part of the device that is narrowed further.
#[derive(Clone)]
enum Part {
    Device,
    Attributes,
    Domain(String),
    Other,
}

#[derive(Default)]
struct Finder {
    reads: BTreeSet<Read>,
    everything: bool,
    /// What variables of `cel.bind` stand for, by place.
    bound: BTreeMap<usize, Part>,
}

impl Finder {
    /// Reads of an expression whose value is used as it is.
    fn code(&mut self, code: &Code) {
        match self.part(code) {
            Part::Other => {}
            Part::Device | Part::Attributes | Part::Domain(_) => self.everything = true,
        }
    }

    /// Which part of the device an expression is. Everything that it reads on the way is noted.
    fn part(&mut self, code: &Code) -> Part {
        match code {
            Code::Constant(Value::Device) => Part::Device,
            Code::Constant(_) => Part::Other,
            Code::Variable(place) => self.bound.get(place).cloned().unwrap_or(Part::Other),
            Code::Select { of, field, .. } => {
                let of = self.part(of);
                self.narrow(of, field)
            }
            Code::Index { of, key, optional } => {
                let of = self.part(of);
                match (of, key.as_ref()) {
                    // A domain is always there unless it is asked for as an optional.
                    (Part::Attributes, Code::Constant(Value::String(key))) if *optional => {
                        self.reads.insert(Read::Domain(key.to_string()));
                        Part::Domain(key.to_string())
                    }
                    (of, Code::Constant(Value::String(key))) => self.narrow(of, key),
                    (Part::Other, key) => {
                        self.code(key);
                        Part::Other
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

    fn narrow(&mut self, of: Part, field: &str) -> Part {
        match of {
            Part::Device => match field {
                "attributes" => Part::Attributes,
                "driver" => self.reading(Read::Driver),
                _ => self.reading(Read::Offer),
            },
            Part::Attributes => Part::Domain(field.to_owned()),
            Part::Domain(domain) => self.reading(Read::Attribute(format!("{domain}/{field}"))),
            Part::Other => Part::Other,
        }
    }

    fn call(&mut self, function: &str, arguments: &[Code]) -> Part {
        if let ("@in", [Code::Constant(Value::String(key)), container]) = (function, arguments) {
            return match self.part(container) {
                Part::Attributes => self.reading(Read::Domain(key.to_string())),
                Part::Domain(domain) => self.reading(Read::Attribute(format!("{domain}/{key}"))),
                Part::Device => self.all(),
                Part::Other => Part::Other,
            };
        }
        self.every(arguments)
    }

    /// `cel.bind` is a loop over nothing: its accumulator stands for what it begins with.
    fn fold(&mut self, fold: &Fold) -> Part {
        if matches!(&fold.range, Code::List(elements) if elements.is_empty()) {
            let initial = self.part(&fold.initial);
            self.bound.insert(fold.accumulator, initial);
            return self.part(&fold.result);
        }
        self.every([&fold.range, &fold.initial, &fold.condition, &fold.step, &fold.result])
    }

    fn every<'c>(&mut self, codes: impl IntoIterator<Item = &'c Code>) -> Part {
        codes.into_iter().for_each(|code| self.code(code));
        Part::Other
    }

    fn reading(&mut self, read: Read) -> Part {
        self.reads.insert(read);
        Part::Other
    }

    fn all(&mut self) -> Part {
        self.everything = true;
        Part::Other
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
    fn fields_by_name_are_read_one_by_one() {
        let found = reads(
            "device.driver == 'd' && device.attributes['d'].model == 'A' && 'x' in device.attributes['d']",
        );
        assert_eq!(found, these(&[Read::Driver, attribute("d/model"), attribute("d/x")]));
        assert_eq!(reads("has(device.attributes.d.x)"), these(&[attribute("d/x")]));
        assert_eq!(reads("device.attributes['d'].?x.orValue(1) > 0"), these(&[attribute("d/x")]));
        assert_eq!(reads("'d' in device.attributes"), these(&[Read::Domain("d".to_owned())]));
    }

    #[test]
    fn what_cel_bind_names_is_followed() {
        let found =
            reads("cel.bind(a, device.attributes['d'], a.model == 'A' && a.?x.orValue(1) == 1)");
        assert_eq!(found, these(&[attribute("d/model"), attribute("d/x")]));
    }

    #[test]
    fn capacities_and_sharing_are_what_a_device_offers() {
        assert_eq!(
            reads("device.capacity['d'].memory.isGreaterThan(quantity('1Gi'))"),
            these(&[Read::Offer])
        );
        assert_eq!(reads("device.allowMultipleAllocations"), these(&[Read::Offer]));
    }

    #[test]
    fn an_expression_that_goes_over_attributes_reads_everything() {
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
