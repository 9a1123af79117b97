"""Measures of similarity beyond CKA: numbers of two Gram matrices over the same images."""

from vitsee_core.measures.base import Measure
from vitsee_core.measures.common_neighbours import Cknna, MutualKnn
from vitsee_core.measures.factors import Procrustes, Svcca
from vitsee_core.measures.flattened import Cka, Gulp, Rsa
from vitsee_core.measures.prediction import RidgeR2

__all__ = ["Cka", "Cknna", "Gulp", "Measure", "MutualKnn", "Procrustes", "RidgeR2", "Rsa", "Svcca"]
