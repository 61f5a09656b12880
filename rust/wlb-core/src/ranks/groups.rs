//! Documents that stay together: groups on one rank, or bundles in one micro-batch.

use std::collections::BTreeMap;

use crate::balance::{Item, sort};

/// The indices of each group, groups in order of their first index. Without groups each index is a group.
pub(super) fn members(count: usize, groups: &[i64]) -> Vec<Vec<u32>> {
    if groups.is_empty() {
        return (0..count as u32).map(|index| vec![index]).collect();
    }
    let mut places = BTreeMap::new();
    let mut members: Vec<Vec<u32>> = Vec::new();
    for (&group, index) in groups.iter().zip(0..) {
        let place = *places.entry(group).or_insert(members.len());
        if place == members.len() {
            members.push(Vec::new());
        }
        members[place].push(index);
    }
    members
}

/// Items, costliest first, and where each stands.
pub(super) struct Placed {
    pub(super) items: Vec<Item>,
    /// Place in `items` of the item with each index.
    pub(super) places: Vec<u32>,
}

impl Placed {
    pub(super) fn new(items: Vec<Item>) -> Self {
        let mut places = vec![0; items.len()];
        items.iter().zip(0..).for_each(|(item, place)| places[item.index as usize] = place);
        Self { items, places }
    }

    /// The item with this index.
    pub(super) fn of(&self, index: u32) -> &Item {
        &self.items[self.places[index as usize] as usize]
    }

    /// Each group of items as one item, costliest first.
    pub(super) fn grouped(&self, members: &[Vec<u32>]) -> Vec<Item> {
        let item = |(index, members): (usize, &Vec<u32>)| {
            let held = || members.iter().map(|&member| self.of(member));
            Item {
                cost: held().map(|item| item.cost).sum(),
                tokens: held().map(|item| item.tokens).sum(),
                documents: held().map(|item| item.documents).sum(),
                index: index as u32,
            }
        };
        let mut items: Vec<Item> = members.iter().enumerate().map(item).collect();
        sort(&mut items);
        items
    }
}
