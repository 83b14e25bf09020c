"""Medians without NaN are numpy's, where something is known."""

import warnings

import numpy as np
import pytest
from eprt.diagnostics.windows.medians import low_median, median, median_of_known


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_median_is_numpys_without_nan(axis):
    rng = np.random.default_rng(axis)
    values = rng.normal(size=(6, 7, 5))
    values[rng.random(values.shape) < 0.4] = np.nan
    values[0, 0] = values[:, 1, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns where there is nothing but NaN
        expected = np.nanmedian(values, axis=axis)
    np.testing.assert_array_equal(median(values, axis), expected)


def test_the_low_median_is_one_of_the_values():
    values = np.array([[4.0, 1.0, np.nan, 9.0, 2.0], [3.0, np.nan, 1.0, 2.0, np.nan], [np.nan] * 5])
    np.testing.assert_array_equal(low_median(values, 1), [2.0, 2.0, np.nan])
    np.testing.assert_array_equal(median(values, 1), [3.0, 2.0, np.nan])


def test_of_all_that_is_known():
    assert median_of_known(np.array([[1.0, np.nan], [3.0, 8.0]])) == 3.0
    assert median_of_known(np.array([np.nan])) == median_of_known(np.array([])) == 0.0
