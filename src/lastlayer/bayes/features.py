"""Linear features phi_tilde and affine features phi = [phi_tilde, 1]."""

from lastlayer.bayes.statistics import affine_features as affine_features
from lastlayer.bayes.statistics import linear_features as linear_features
