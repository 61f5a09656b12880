//! Numbers of a saved state, of which there may be tens of millions: who writes or reads them listens.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::interrupt::Meter;

/// Steps of other work that take about as long as a number to or from its digits.
const STEPS: usize = 8;

/// A vector that is saved as one, and can be interrupted in that.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Column<T>(Vec<T>);

impl<T> Default for Column<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Deref for Column<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.0
    }
}

impl<T> DerefMut for Column<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        &mut self.0
    }
}

impl<T: Serialize> Serialize for Column<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut meter = Meter::default();
        serializer.collect_seq(self.iter().inspect(|_| meter.spend(STEPS)))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Column<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Numbers<T> {
            type Value = Column<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Column<T>, A::Error> {
                let (mut column, mut meter) = (Column::default(), Meter::default());
                while let Some(number) = numbers.next_element()? {
                    meter.spend(STEPS);
                    column.push(number);
                }
                Ok(column)
            }
        }

        deserializer.deserialize_seq(Numbers(PhantomData))
    }
}
