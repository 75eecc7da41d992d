//! Constraints over the devices of a claim, while the search adds and takes back devices.

use tessera_api::names::DriverName;

use crate::model::{Attribute, Claim, Constraint, ConstraintKind, Device};

/// The constraints of one claim and the devices they hold so far.
#[derive(Debug)]
pub(crate) struct ConstraintSet<'a> {
    constraints: Vec<Held<'a>>,
}

#[derive(Debug)]
struct Held<'a> {
    constraint: &'a Constraint,
    /// Values of the devices added, in order.
    values: Vec<&'a Attribute>,
}

impl<'a> ConstraintSet<'a> {
    pub(crate) fn new(claim: &'a Claim) -> Self {
        let hold = |constraint| Held { constraint, values: Vec::new() };
        Self { constraints: claim.constraints.iter().map(hold).collect() }
    }

    /// Adds the device if all constraints that bind `request` admit it; otherwise changes nothing and names the attribute.
    ///
    /// `request` and `alternative` are the names of a request and of the chosen subrequest in it.
    pub(crate) fn add(
        &mut self,
        request: &str,
        alternative: Option<&str>,
        driver: &DriverName,
        device: &'a Device,
    ) -> Result<(), &'a str> {
        let refused = self.constraints.iter_mut().enumerate().find_map(|(i, held)| {
            let attribute = held.add(request, alternative, driver, device).err()?;
            Some((i, attribute))
        });
        if let Some((i, attribute)) = refused {
            self.constraints[..i].iter_mut().for_each(|held| held.remove(request, alternative));
            return Err(attribute);
        }
        Ok(())
    }

    /// Takes back the last device added for this request.
    pub(crate) fn remove(&mut self, request: &str, alternative: Option<&str>) {
        for held in &mut self.constraints {
            held.remove(request, alternative);
        }
    }
}

impl<'a> Held<'a> {
    fn binds(&self, request: &str, alternative: Option<&str>) -> bool {
        let names = &self.constraint.requests;
        let full = || alternative.map(|a| format!("{request}/{a}"));
        names.is_empty() || names.iter().any(|n| n == request || full().as_ref() == Some(n))
    }

    fn add(
        &mut self,
        request: &str,
        alternative: Option<&str>,
        driver: &DriverName,
        device: &'a Device,
    ) -> Result<(), &'a str> {
        if !self.binds(request, alternative) {
            return Ok(());
        }
        let (ConstraintKind::Match(attribute) | ConstraintKind::Distinct(attribute)) = &self.constraint.kind
        else {
            return Err("");
        };
        let Some(value) = device.attribute(driver, attribute) else { return Err(attribute) };
        // The first device only needs to have the attribute. Lists are compared with the gate DRAListTypeAttributes only.
        let comparable = !matches!(value, Attribute::List(_) | Attribute::Unknown);
        let admitted = match (self.values.first(), &self.constraint.kind) {
            (None, _) => true,
            (Some(first), ConstraintKind::Match(_)) => comparable && *first == value,
            (Some(_), _) => comparable && !self.values.contains(&value),
        };
        if !admitted {
            return Err(attribute);
        }
        self.values.push(value);
        Ok(())
    }

    fn remove(&mut self, request: &str, alternative: Option<&str>) {
        if self.binds(request, alternative) {
            self.values.pop();
        }
    }
}
